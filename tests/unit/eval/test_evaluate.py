"""Avg@k of a sampler: exactly k graded, independent samples of every problem, and faults are not answers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pnpo_megatron.errors import ConfigError, RewardFaultError, RolloutError
from pnpo_megatron.eval.benchmarks import Benchmark
from pnpo_megatron.eval.evaluate import Grade, evaluate
from pnpo_megatron.eval.results import EvalResult, print_table
from pnpo_megatron.reward.math_answer import grade_sample
from pnpo_megatron.seeds import derive_seed
from pnpo_megatron.types import Prompt, RewardInput, RewardResult, Rollout, RolloutGroup, Sampling

SAMPLING = Sampling(temperature=0.7, max_tokens=8)


def benchmark(name: str, *answers: str) -> Benchmark:
    return Benchmark(name, tuple(Prompt(f"{name}-{i}", (1, 2), answer) for i, answer in enumerate(answers)))


@dataclass
class FakeSampler:
    """Answers with `reply(problem id, generator)`; the generator is seeded as the Sampler protocol says."""

    reply: Callable[[str, random.Random], str]
    change: Callable[[list[RolloutGroup]], list[RolloutGroup]] = lambda groups: groups
    calls: list[tuple[Sampling, tuple[int | str, ...]]] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: tuple[int | str, ...]
    ) -> Iterator[RolloutGroup]:
        self.calls.append((sampling, seed))
        groups = []
        for prompt in reversed(prompts):  # finished groups may come in any order
            seeds = [derive_seed(*seed, prompt.id, index) for index in range(group_size)]
            texts = [self.reply(prompt.id, random.Random(value)) for value in seeds]
            rollouts = [self._rollout(text, index, seeds[index]) for index, text in enumerate(texts)]
            groups.append(RolloutGroup(prompt, tuple(reversed(rollouts))))
        yield from self.change(groups)

    @staticmethod
    def _rollout(text: str, index: int, seed: int) -> Rollout:
        reason = "length" if text.endswith("...") else "stop"
        return Rollout(
            torch.arange(len(text)), torch.zeros(len(text)), reason, index, seed, version=3, text=text
        )

    def load_weights(self, tensors: object, version: int) -> None: ...

    def close(self) -> None: ...


def maths(inputs: Sequence[RewardInput]) -> Callable[[], list[RewardResult]]:
    return lambda: [
        RewardResult(float(grade_sample(sample).correct), answer=sample.text) for sample in inputs
    ]


def run(
    sampler: FakeSampler, *benchmarks: Benchmark, k: int = 4, grade: Grade = maths, seed: int = 1
) -> EvalResult:
    return evaluate(sampler, benchmarks, samples=k, sampling=SAMPLING, grade=grade, seed=seed)


def always(text: str) -> FakeSampler:
    return FakeSampler(lambda problem, draw: text)


def coin(problem: str, draw: random.Random) -> str:
    return f"Answer: {draw.randrange(1000)}"


def test_h36_a_right_and_a_wrong_problem_give_one_half() -> None:
    result = run(always("Answer: 5"), benchmark("toy", "5", "6"))
    assert result.benchmarks[0].correct == [[True] * 4, [False] * 4]
    metrics = result.to_metrics()
    assert metrics["eval/toy/avg_at_k"] == metrics["eval/toy/pass_at_k"] == metrics["eval/macro"] == 0.5
    assert metrics["eval/toy/stderr"] == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    assert metrics["eval/toy/stderr_sampling"] == 0.0


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: [replace(groups[0], rollouts=groups[0].rollouts[:2]), *groups[1:]],
        lambda groups: [
            replace(groups[0], rollouts=(*groups[0].rollouts[:3], groups[0].rollouts[0])),
            *groups[1:],
        ],
        lambda groups: [
            replace(groups[0], rollouts=tuple(replace(rollout, seed=9) for rollout in groups[0].rollouts)),
            *groups[1:],
        ],
        lambda groups: groups[1:],
    ],
    ids=["two samples lost", "one sample twice", "one seed for all", "one problem lost"],
)
def test_h36_missing_or_repeated_samples_are_an_error_and_never_averaged(
    change: Callable[[list[RolloutGroup]], list[RolloutGroup]],
) -> None:
    with pytest.raises(RolloutError, match="toy.*'toy-1'"):
        run(FakeSampler(coin, change), benchmark("toy", "5", "6"))


def test_the_macro_mean_weighs_benchmarks_alike_whatever_their_size() -> None:
    result = run(always("Answer: 5"), benchmark("small", "5"), benchmark("large", "6", "6", "6"))
    assert result.to_metrics()["eval/macro"] == 0.5  # not 1/4


def test_h35_samples_of_a_problem_are_independent_draws_that_repeat_with_the_seed() -> None:
    def texts(seed: int) -> list[list[str]]:
        problems = run(FakeSampler(coin), benchmark("toy", "5", "6"), k=32, seed=seed).benchmarks[0].samples
        return [[sample.text for sample in problem] for problem in problems]

    first = texts(1)
    assert all(len(set(problem)) > 16 for problem in first)
    assert first[0] != first[1]
    assert first == texts(1) != texts(2)


def test_h35_a_problem_gets_the_same_draws_whatever_stands_beside_it() -> None:
    alone = run(FakeSampler(coin), benchmark("toy", "5"))
    together = run(FakeSampler(coin), benchmark("other", "5"), benchmark("toy", "5", "6"))
    assert alone.benchmarks[0].samples[0] == together.benchmarks[1].samples[0]
    assert [sample.sample for sample in alone.benchmarks[0].samples[0]] == [0, 1, 2, 3]


def test_h35_several_samples_at_temperature_zero_are_refused() -> None:
    for k in (1, 2):
        cold = replace(SAMPLING, temperature=0.0)
        if k == 1:
            evaluate(always("5"), [benchmark("toy", "5")], samples=k, sampling=cold, grade=maths, seed=1)
            continue
        with pytest.raises(ConfigError, match="samples = 2 at eval.temperature = 0.0"):
            evaluate(always("5"), [benchmark("toy", "5")], samples=k, sampling=cold, grade=maths, seed=1)


def test_h12_the_evaluations_own_sampling_reaches_the_sampler() -> None:
    sampler = always("5")
    run(sampler, benchmark("toy", "5"))
    assert sampler.calls == [(SAMPLING, (1, "eval", "toy"))]


@pytest.mark.parametrize("names", [(), ("toy", "toy")])
def test_no_benchmark_or_two_of_one_name_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="eval.benchmarks"):
        run(always("5"), *(benchmark(name, "5") for name in names))


@dataclass
class FaultyGrader:
    """Fails the first `failures` grades of every sample."""

    failures: int
    seen: dict[str, int] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[RewardInput]) -> Callable[[], list[RewardResult]]:
        return lambda: [self._one(sample) for sample in inputs]

    def _one(self, sample: RewardInput) -> RewardResult:
        self.seen[sample.text] = self.seen.get(sample.text, 0) + 1
        if self.seen[sample.text] <= self.failures:
            return RewardResult(None, fault="the grading worker died")
        return RewardResult(float(grade_sample(sample).correct))


def test_a_fault_is_graded_again_and_counted_and_never_a_wrong_answer() -> None:
    result = run(always("Answer: 5"), benchmark("toy", "5"), k=1, grade=FaultyGrader(failures=1))
    assert result.to_metrics()["eval/toy/avg_at_k"] == 1.0
    assert result.to_metrics()["eval/toy/faults"] == 1.0


def test_a_fault_that_stays_ends_the_evaluation_and_names_the_sample() -> None:
    with pytest.raises(RewardFaultError, match="toy: sample 0 of problem 'toy-0'.*worker died"):
        run(always("Answer: 5"), benchmark("toy", "5"), k=1, grade=FaultyGrader(failures=2))


def test_truncated_share_length_and_majority_are_those_of_the_samples() -> None:
    replies = iter(["Answer: 5", "Answer: 5", "Answer: 7", "..."])
    result = run(FakeSampler(lambda problem, draw: next(replies)), benchmark("toy", "5"))
    row = result.benchmarks[0].summary()
    assert row["truncated_fraction"] == 0.25
    assert row["length_mean"] == (9 + 9 + 9 + 3) / 4
    assert (row["avg_at_k"], row["pass_at_k"], row["majority_at_k"]) == (0.5, 1.0, 1.0)


def test_metrics_hold_no_number_that_does_not_exist() -> None:
    metrics = run(always("Answer: 5"), benchmark("toy", "5"), k=1).to_metrics()
    assert not any(math.isnan(value) for value in metrics.values())
    assert "eval/toy/stderr" not in metrics and "eval/toy/stderr_sampling" not in metrics


def test_the_result_file_keeps_every_verdict_and_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(always("Answer: 5"), benchmark("toy", "5", "6"), k=2)
    path = result.write(tmp_path / "eval", 10, model="toy-model")
    assert path == tmp_path / "eval" / "step_000010.json"
    stored = json.loads(path.read_text())
    assert (stored["step"], stored["model"], stored["macro"]["mean"]) == (10, "toy-model", 0.5)
    assert stored["benchmarks"]["toy"]["correct"] == {"toy-0": [1, 1], "toy-1": [0, 0]}
    lines = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert [(line["problem"], line["sample"], line["correct"]) for line in lines] == [
        ("toy-0", 0, True), ("toy-0", 1, True), ("toy-1", 0, False), ("toy-1", 1, False)
    ]  # fmt: skip
    monkeypatch.setattr("os.replace", _fail)
    with pytest.raises(OSError, match="disk"):
        run(always("Answer: 6"), benchmark("toy", "5", "6"), k=2).write(tmp_path / "eval", 10)
    assert json.loads(path.read_text()) == stored


def _fail(*paths: object) -> None:
    raise OSError("disk full")


def test_the_table_shows_percent_with_standard_errors() -> None:
    console = Console(file=StringIO(), width=120)
    print_table(run(always("Answer: 5"), benchmark("toy", "5", "6")).to_json(), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    toy = next(line for line in text.splitlines() if "toy" in line)
    assert toy.split() == ["toy", "2", "4", "50.0", "50.0", "50.0", "50.0", "0.0", "9.0"]
    assert "macro" in text
