"""A killed evaluation goes on to what an unbroken one gives; results are compared problem by problem."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from test_evaluate import SAMPLING, FakeSampler, benchmark, maths

from pnpo_megatron.analysis.compare_eval import compare, main, read_result
from pnpo_megatron.errors import ConfigError, DataError
from pnpo_megatron.eval.evaluate import evaluate
from pnpo_megatron.eval.overlap import DAPO_MATH_17K, in_dapo_math_17k, in_prompts, warning
from pnpo_megatron.eval.progress import Progress, folder_digest, problems_digest
from pnpo_megatron.eval.results import EvalResult, SampleResult
from pnpo_megatron.types import Prompt, RolloutGroup

REQUEST = {"weights": "abc", "seed": 1}
TOY = (benchmark("one", *"01234"), benchmark("two", *"56789"))


class KilledError(Exception):
    """In place of SIGKILL."""


def digit(problem: str, draw: random.Random) -> str:
    right = problem[-1] if problem.startswith("one") else str(5 + int(problem[-1]))
    return f"\u2028 \u00e9 {draw.randrange(99)}\nAnswer: {right if draw.random() < 0.5 else '77'}"


@dataclass
class DyingSampler(FakeSampler):
    """Dies after some groups; counts what it was asked for."""

    groups: int = 10**9
    asked: int = 0

    def generate(self, prompts: Sequence[Prompt], *rest: Any) -> Iterator[RolloutGroup]:
        for group in super().generate(prompts, *rest):
            if self.groups == 0:
                raise KilledError
            self.groups -= 1
            self.asked += 1
            yield group


def run(path: Path, sampler: FakeSampler, **request: Any) -> EvalResult:
    progress = Progress(path, {**REQUEST, **request})
    return evaluate(sampler, TOY, samples=8, sampling=SAMPLING, grade=maths, seed=1, progress=progress)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("groups", [0, 1, 4, 5, 7, 9])
def test_a_killed_evaluation_resumes_to_equal_ids_texts_and_verdicts(
    tmp_path: Path, groups: int, torn: bool
) -> None:
    whole = run(tmp_path / "whole.jsonl", DyingSampler(digit)).benchmarks
    assert all(0.1 < one.score.mean < 0.9 for one in whole), "a task with right and wrong answers"
    path = tmp_path / "killed.jsonl"
    with pytest.raises(KilledError):
        run(path, DyingSampler(digit, groups=groups))
    if torn:  # the kill came in the middle of a line
        path.write_bytes(path.read_bytes() + b'{"benchmark": "two", "problem": "two-0", "sam')
    again = DyingSampler(digit)
    assert run(path, again).benchmarks == whole
    assert again.asked == 10 - groups, "what was sampled is not sampled again"


def test_responses_to_another_request_are_refused_by_name_or_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    with pytest.raises(KilledError):
        run(path, DyingSampler(digit, groups=3))
    kept = path.read_bytes()
    with pytest.raises(ConfigError, match=r"weights = 'abc' \(now 'def'\).*--overwrite"):
        run(path, DyingSampler(digit), weights="def")
    assert path.read_bytes() == kept
    assert len(Progress(path, REQUEST)) == 3
    assert len(Progress(path, {"weights": "def"}, restart=True)) == 0


def test_a_finished_result_reads_back_as_it_was(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "p.jsonl", REQUEST)
    result = evaluate(
        DyingSampler(digit), TOY, samples=8, sampling=SAMPLING, grade=maths, seed=1, progress=progress
    )
    path = result.write(tmp_path, 0, request=REQUEST)
    progress.finish()
    assert json.loads(path.read_text()) == {"step": 0, "request": REQUEST, **result.to_json()}
    lines = path.with_suffix(".jsonl").read_text().split("\n")[:-1]  # a text may hold U+2028
    samples = [(one.name, sample) for one in result.benchmarks for rows in one.samples for sample in rows]
    for line, (name, sample) in zip(map(json.loads, lines), samples, strict=True):
        assert (line.pop("benchmark"), line.pop("length")) == (name, len(sample.ids))
        assert SampleResult(**line | {"ids": tuple(line["ids"])}) == sample
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step_000000.json", "step_000000.jsonl"]


def test_a_checkpoint_is_named_by_what_is_in_it(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "weights").write_bytes(bytes(range(256)) * 4096)
    assert folder_digest(tmp_path / "a") == folder_digest(tmp_path / "b")
    content = bytearray(bytes(range(256)) * 4096)
    content[500_000] ^= 1
    (tmp_path / "b" / "deep" / "weights").write_bytes(content)
    assert folder_digest(tmp_path / "a") != folder_digest(tmp_path / "b")
    moved = replace(TOY[0], problems=TOY[0].problems[1:])
    assert problems_digest(TOY[0]) != problems_digest(moved)


def result_file(folder: Path, name: str, correct: dict[str, dict[str, list[int]]]) -> Path:
    rows = {
        key: {"k": 2, "problems": len(value), "correct": value, "avg_at_k": 0.0}
        for key, value in correct.items()
    }
    (folder / name).write_text(json.dumps({"benchmarks": rows}))
    return folder / name


def test_two_results_are_compared_problem_by_problem_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = result_file(tmp_path, "a", {"x": {"p": [0, 0], "q": [1, 1]}, "y": {"r": [0, 1], "s": [0, 0]}})
    new = result_file(tmp_path, "b", {"x": {"q": [1, 1], "p": [1, 1]}, "y": {"r": [0, 1], "s": [1, 0]}})
    found = compare(read_result(old), read_result(new))
    # x: differences 1 and 0; y: 0 and 1/2. Standard errors |d1 - d2| / 2.
    assert (found["x"].mean, found["x"].stderr) == (0.5, pytest.approx(0.5))
    assert (found["y"].mean, found["y"].stderr) == (0.25, pytest.approx(0.25))
    stderr = (0.5**2 + 0.25**2) ** 0.5 / 2
    macro = found["macro"]
    assert (macro.mean, macro.stderr) == (0.375, pytest.approx(stderr))
    assert (macro.low95, macro.high95) == pytest.approx(
        (0.375 - 1.95996 * stderr, 0.375 + 1.95996 * stderr), 1e-5
    )
    main([str(old), str(new)])
    assert "+37.5" in capsys.readouterr().out


def test_results_on_other_problems_are_refused(tmp_path: Path) -> None:
    old = read_result(result_file(tmp_path, "a", {"x": {"p": [0, 0]}}))
    with pytest.raises(DataError, match=r"x: 2 problems stand in one result only, first 'p'"):
        compare(old, {"x": {"k": 2, "correct": {"q": [1, 1]}}})
    with pytest.raises(DataError, match="share no benchmark"):
        compare(old, {"y": old["x"]})
    with pytest.raises(DataError, match="no evaluation result"):
        read_result(tmp_path / "missing.json")


def test_problems_inside_training_prompts_are_found_whatever_the_template() -> None:
    problem = "Find the largest $n$ such that $n^2 + 1$ divides $10!$, and write it down."
    problems = (Prompt("a", (1,), "1", problem=problem), Prompt("b", (1,), "2", problem="3+4="))
    held = replace(TOY[0], problems=problems)
    prompts = [Prompt("t", (1,), "1", text=f"<user>Solve.\n\n{problem.upper()}\n3+4=<end>")]
    assert in_prompts(held, prompts) == ["a"], "too short a problem proves nothing"
    assert in_prompts(held, prompts[:0]) == []
    assert "1 of 2 problems of one stand in x, so" in warning(held, ["a"], "x")


def test_the_known_overlap_of_amc_2023_with_dapo_math_17k_is_named() -> None:
    path = Path(__file__).resolve().parents[4] / "shared" / "data" / "eval" / "amc23.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    problems = tuple(Prompt(row["id"], (1,), row["answer"], problem=row["problem"]) for row in rows)
    found = in_dapo_math_17k(replace(TOY[0], problems=problems))
    assert sorted(found) == ["amc23-12A-04", "amc23-12A-12", "amc23-12A-14", "amc23-12A-19", "amc23-12A-23",
                             "amc23-12A-24", "amc23-12B-14", "amc23-12B-16"]  # fmt: skip
    assert len(DAPO_MATH_17K) == len(found)
