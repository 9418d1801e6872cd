"""What an evaluation found: kept per sample, summarised per benchmark, written whole or not at all."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pnpo_megatron.durable import write_text_whole
from pnpo_megatron.eval.avg_at_k import Score, avg_at_k, macro_mean, pass_at_k, percent


@dataclass(frozen=True)
class SampleResult:
    """One graded response."""

    problem: str
    sample: int
    seed: int
    version: int
    correct: bool
    reward: float
    answer: str | None
    finish_reason: str
    ids: tuple[int, ...]
    """Response tokens."""
    timed_out: bool
    text: str

    @property
    def truncated(self) -> bool:
        """Cut at the token limit."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class BenchmarkResult:
    """k graded samples of every problem of one benchmark, in file order."""

    name: str
    k: int
    samples: tuple[tuple[SampleResult, ...], ...]
    """[problems][k]."""
    faults: int = 0
    """Grades that failed at first and were repeated; none of them counts as a wrong answer."""

    @property
    def correct(self) -> list[list[bool]]:
        """[problems][k]."""
        return [[sample.correct for sample in problem] for problem in self.samples]

    @property
    def score(self) -> Score:
        """Avg@k with its standard errors (DECISIONS: Scores)."""
        return avg_at_k(self.correct, self.k)

    def summary(self) -> dict[str, float]:
        """The numbers that metrics and the result file carry. NaN where there is no spread."""
        score, flat = self.score, [sample for problem in self.samples for sample in problem]
        return {
            "avg_at_k": score.mean,
            "stderr": score.stderr,
            "stderr_sampling": score.stderr_sampling,
            "pass_at_k": pass_at_k(self.correct, self.k),
            "majority_at_k": fmean(_majority_correct(problem) for problem in self.samples),
            "truncated_fraction": fmean(sample.truncated for sample in flat),
            "length_mean": fmean(len(sample.ids) for sample in flat),
            "timeouts": float(sum(sample.timed_out for sample in flat)),
            "faults": float(self.faults),
        }


def _majority_correct(samples: Sequence[SampleResult]) -> float:
    """Whether the commonest answer is right; ties share. Answers that grade alike but
    are spelled in two ways count as two, so this is a lower bound; without any answer it is 0."""
    counts = Counter(sample.answer for sample in samples if sample.answer is not None)
    most = max(counts.values(), default=0)
    right = {sample.answer: sample.correct for sample in samples}
    winners = [answer for answer, count in counts.items() if count == most]
    return fmean(right[answer] for answer in winners) if winners else 0.0


@dataclass(frozen=True)
class EvalResult:
    """All benchmarks of one evaluation."""

    benchmarks: tuple[BenchmarkResult, ...]
    seconds: float = 0.0

    @property
    def macro(self) -> Score:
        """Plain mean over benchmarks."""
        return macro_mean([benchmark.score for benchmark in self.benchmarks])

    def to_metrics(self) -> dict[str, float]:
        """Flat ``eval/NAME/...`` keys, ``eval/macro``, ``eval/macro_stderr``; numbers that do not exist
        are left out."""
        metrics = {
            f"eval/{benchmark.name}/{key}": value
            for benchmark in self.benchmarks
            for key, value in benchmark.summary().items()
        }
        metrics |= {"eval/macro": self.macro.mean, "eval/macro_stderr": self.macro.stderr}
        metrics["time/eval_s"] = self.seconds
        return {key: value for key, value in metrics.items() if not math.isnan(value)}

    def to_json(self) -> dict[str, Any]:
        """Summaries, and for every problem its k verdicts."""
        return {
            "macro": _jsonable(asdict(self.macro)),
            "seconds": self.seconds,
            "benchmarks": {
                benchmark.name: {
                    "k": benchmark.k,
                    "problems": len(benchmark.samples),
                    **_jsonable(benchmark.summary()),
                    "correct": {
                        problem[0].problem: [int(sample.correct) for sample in problem]
                        for problem in benchmark.samples
                    },
                }
                for benchmark in self.benchmarks
            },
        }

    def write(self, folder: Path, step: int, **about: Any) -> Path:
        """``step_NNNNNN.json`` (numbers) and ``step_NNNNNN.jsonl`` (every sample with its text) in
        `folder`.

        Args:
            about: what else the file should say, e.g. model and sampling settings.

        Returns:
            The path of the JSON file, which is written last: where it stands, both are complete.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_{step:06d}.json"
        rows = [
            json.dumps(
                {"benchmark": benchmark.name, **asdict(sample), "length": len(sample.ids)}, ensure_ascii=False
            )
            for benchmark in self.benchmarks
            for problem in benchmark.samples
            for sample in problem
        ]
        summary = json.dumps({"step": step, **about, **self.to_json()}, indent=1)
        for target, lines in ((path.with_suffix(".jsonl"), rows), (path, [summary])):
            text = "".join(line + "\n" for line in lines)
            write_text_whole(target, text)
        return path


def print_table(found: Mapping[str, Any], console: Console | None = None) -> None:
    """A table for people of what `EvalResult.to_json` gives: per cent, with standard errors over problems."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("benchmark", "n", "k", "Avg@k", "± stderr", "pass@k", "maj@k", "cut", "tokens"):
        table.add_column(heading, justify="left" if heading == "benchmark" else "right")
    shares = ("avg_at_k", "stderr", "pass_at_k", "majority_at_k", "truncated_fraction")
    for name, row in found["benchmarks"].items():
        cells = (percent(row[key]) for key in shares)
        table.add_row(name, str(row["problems"]), str(row["k"]), *cells, f"{row['length_mean']:.1f}")
    table.add_section()
    table.add_row("macro", "", "", percent(found["macro"]["mean"]), percent(found["macro"]["stderr"]))
    (console or Console(soft_wrap=True)).print(table)


def _jsonable(values: dict[str, float]) -> dict[str, float | None]:
    return {key: None if math.isnan(value) else value for key, value in values.items()}
