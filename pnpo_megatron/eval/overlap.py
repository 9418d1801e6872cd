"""Problems of a benchmark that a model was, or may have been, trained on: letters and digits compared."""

import hashlib
from collections.abc import Iterable, Sequence

from pnpo_megatron.eval.benchmarks import Benchmark
from pnpo_megatron.types import Prompt

SHORTEST = 30
"""Letters and digits from which on equality is no accident: "3+4=" stands in many prompts."""
DAPO_MATH_17K = {
    "3584a5f3eb07d5e9", "e30faa3e52ebaa10", "4b9e792f98b51ae9", "3c86aa74c0f64287",
    "fcff3b5230b7c6c4", "ddfc733edb51b9d0", "a129f0bdddc1ebed", "1e6b0631848c0e98",
}  # fmt: skip
"""Eight AMC 2023 problems that stand word for word in DAPO-Math-17k: SHA-256 of their letters and digits."""


def in_dapo_math_17k(benchmark: Benchmark) -> list[str]:
    """Ids of the problems known to stand in DAPO-Math-17k, whatever this model was trained on."""
    return [problem.id for problem in benchmark.problems if _digest(problem.problem) in DAPO_MATH_17K]


def in_prompts(benchmark: Benchmark, prompts: Iterable[Prompt]) -> list[str]:
    """Ids of the problems that stand inside one of the training prompts."""
    seen = "\0".join(_letters(prompt.text) for prompt in prompts)
    return [
        problem.id
        for problem in benchmark.problems
        if len(letters := _letters(problem.problem)) >= SHORTEST and letters in seen
    ]


def warning(benchmark: Benchmark, ids: Sequence[str], where: str) -> str:
    """A sentence for the log."""
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    return (
        f"warning: {len(ids)} of {len(benchmark.problems)} problems of {benchmark.name} stand in "
        f"{where}, so its score may be on problems seen in training: {', '.join(ids[:8])}{more}"
    )


def _letters(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


def _digest(text: str) -> str:
    return hashlib.sha256(_letters(text).encode()).hexdigest()[:16]
