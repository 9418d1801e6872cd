"""Prompt files: repeats merged and counted, conflicts named, bad rows found, an order that resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from toy_tokenizer import toy_tokenizer

from pnpo_megatron.data.order import PromptSource
from pnpo_megatron.data.prompts import load_prompts
from pnpo_megatron.errors import ConfigError, DataError
from pnpo_megatron.eval.benchmarks import load_benchmark
from pnpo_megatron.types import Prompt

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
TOKENIZER = toy_tokenizer()


def raw(path: Path, **settings: Any) -> Any:
    return load_prompts(path, TOKENIZER, template="raw", **settings)


def write_lines(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_dapo(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    """(problem, gold, index) rows in DAPO-Math-17k's columns."""
    records = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": problem, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": gold, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": index},
        }
        for problem, gold, index in rows
    ]
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def test_h05_repeats_are_merged_whatever_their_index_and_counted(tmp_path: Path) -> None:
    rows = [(f"add {word}", word, f"{word}-{copy}") for copy in range(4) for word in ("one", "two", "be")]
    loaded = raw(write_dapo(tmp_path / "dapo.parquet", rows))
    assert [(prompt.id, prompt.text, prompt.answer) for prompt in loaded.prompts] == [
        ("one-0", "add one", "one"),
        ("two-0", "add two", "two"),
        ("be-0", "add be", "be"),
    ]
    assert (loaded.summary.rows, loaded.summary.duplicates, loaded.summary.kept) == (12, 9, 3)
    assert "12 rows: 9 repeats merged" in str(loaded.summary)


def test_h05_one_prompt_with_two_golds_stops_or_is_dropped_with_its_repeats(tmp_path: Path) -> None:
    rows = [("add one", "1", "a"), ("add two", "2", "b"), ("add two", "3", "c"), ("add two", "2", "d")]
    path = write_dapo(tmp_path / "dapo.parquet", rows)
    with pytest.raises(
        DataError, match=r"1 prompts have more than one gold.*'2' at .*row 2 .*'3' at .*row 3"
    ):
        raw(path)
    loaded = raw(path, conflicts="drop")
    assert [prompt.id for prompt in loaded.prompts] == ["a"]
    assert (loaded.summary.conflicts, loaded.summary.duplicates, len(loaded.summary.conflicting)) == (3, 0, 1)


def test_h05_repeats_in_a_benchmark_are_not_more_problems(tmp_path: Path) -> None:
    rows = [
        {"id": f"{index}-{copy}", "problem": f"add {index}", "answer": "1"}
        for copy in range(32)
        for index in "abc"
    ]
    assert len(load_benchmark(write_lines(tmp_path / "aime.jsonl", *rows), TOKENIZER).problems) == 3


def test_the_published_dapo_columns_give_149_prompts_or_name_the_three_conflicts() -> None:
    path = SHARED / "train" / "dapo_schema_200.parquet"
    if not path.is_file():
        pytest.skip("shared training data is not beside the project")
    summary = raw(path, conflicts="drop").summary
    assert (summary.rows, summary.duplicates, summary.conflicts, summary.kept) == (200, 45, 6, 149)
    with pytest.raises(DataError) as error:
        raw(path)
    assert (
        "3 prompts" in str(error.value)
        and str(error.value).count("(id ") == 6
        and "\n" not in str(error.value)
    )


@pytest.mark.parametrize(
    ("name", "count"), [("aime24", 30), ("aime25", 30), ("amc23", 40), ("math500", 500), ("gsm8k_test", 200)]
)
def test_every_shared_benchmark_loads_whole(name: str, count: int) -> None:
    path = SHARED / "eval" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip("shared evaluation data is not beside the project")
    benchmark = load_benchmark(path, TOKENIZER)
    assert (benchmark.name, len(benchmark.problems)) == (name, count)


GOOD = {"id": "a", "problem": "add one", "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([GOOD, "{not json"], r"file.jsonl:2: not JSON"),
        ([GOOD, "", "[1, 2]"], r"file.jsonl:3: a JSON list"),
        (
            [GOOD, {"id": "b", "problem": "add"}],
            r"file.jsonl:2: key 'answer' is missing \(found: id, problem\)",
        ),
        ([{"id": "b", "problem": " ", "answer": "1"}], r"file.jsonl:1: problem is ' '"),
        ([{"id": "b", "problem": "add", "answer": 27.0}], r"file.jsonl:1: answer is 27.0"),
        ([GOOD, {**GOOD, "problem": "add two"}], r"file.jsonl:2: id 'a' stands already at .*file.jsonl:1"),
        ([], "is empty"),
        (["\n", "  "], "is empty"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(rows: list[Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=named):
        raw(write_lines(tmp_path / "file.jsonl", *rows))


def test_files_that_are_not_what_they_say_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        raw(tmp_path / "nowhere.jsonl")
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="not a readable parquet"):
        raw(tmp_path / "text.parquet")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        raw(tmp_path / "binary.jsonl")
    parquet.write_table(pyarrow.table({"question": ["add one"]}), tmp_path / "other.parquet")
    with pytest.raises(
        DataError, match=r"columns \['prompt', 'reward_model'\] are missing \(found: question\)"
    ):
        raw(tmp_path / "other.parquet")


def test_other_columns_and_integer_answers_are_kept_as_text(tmp_path: Path) -> None:
    row = {"id": 7, "problem": "add one", "answer": 33, "source": "here", "level": 5}
    (prompt,) = raw(write_lines(tmp_path / "file.jsonl", row)).prompts
    assert (prompt.id, prompt.answer, dict(prompt.meta)) == ("7", "33", {"source": "here", "level": "5"})


def test_overlong_prompts_are_dropped_and_counted_and_a_benchmark_is_never_cut(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "file.jsonl", GOOD, {"id": "b", "problem": "add one two be brief", "answer": "1"}
    )
    loaded = raw(path, max_prompt_tokens=3)  # BOS and two words
    assert [prompt.id for prompt in loaded.prompts] == ["a"] and loaded.summary.overlong == 1
    with pytest.raises(DataError, match="no prompt is left"):
        raw(path, max_prompt_tokens=2)
    with pytest.raises(DataError, match="problem 'b' takes 6 tokens"):
        load_benchmark(path, TOKENIZER, template="raw", max_prompt_tokens=3)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{index}", (index,), "1") for index in range(count)]


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in batch]


@pytest.mark.parametrize("shuffle", [True, False])
def test_h31_ten_steps_equal_four_then_resume_then_six_over_pass_borders(shuffle: bool) -> None:
    whole = PromptSource(prompts(7), seed=3, shuffle=shuffle)
    expected = [ids(whole.take(5)) for _ in range(10)]
    first = PromptSource(prompts(7), seed=3, shuffle=shuffle)
    seen = [ids(first.take(5)) for _ in range(4)]
    saved = json.loads(json.dumps(first.position))
    second = PromptSource(prompts(7), seed=3, shuffle=shuffle)
    second.restore(saved)
    assert seen + [ids(second.take(5)) for _ in range(6)] == expected
    assert second.position == whole.position


def test_h31_every_step_of_a_run_can_be_resumed_with_refills_of_odd_sizes() -> None:
    source = PromptSource(prompts(11), seed=1)
    sizes = [4, 3, 8, 1, 11, 2, 5, 5, 7]
    positions, batches = [], []
    for size in sizes:
        positions.append(source.position)
        batches.append(ids(source.take(size)))
    for start in range(len(sizes)):
        resumed = PromptSource(prompts(11), seed=1)
        resumed.restore(positions[start])
        assert [ids(resumed.take(size)) for size in sizes[start:]] == batches[start:]


def test_every_data_pass_holds_every_prompt_once_in_another_order_and_no_batch_a_prompt_twice() -> None:
    source = PromptSource(prompts(10), seed=5)
    batches = [ids(source.take(4)) for _ in range(25)]  # 100 draws, 10 passes
    assert all(len(set(batch)) == 4 for batch in batches)
    flat = [name for batch in batches for name in batch]
    assert all(flat.count(f"p{index}") == 10 for index in range(10))
    exact = PromptSource(prompts(10), seed=5)
    passes = [ids(exact.take(10)) for _ in range(3)]
    assert all(sorted(order) == sorted(passes[0]) for order in passes)
    assert len({tuple(order) for order in passes}) == 3
    assert ids(PromptSource(prompts(10), seed=6).take(10)) != passes[0]
    assert ids(PromptSource(prompts(10), seed=6, shuffle=False).take(10)) == [
        f"p{index}" for index in range(10)
    ]


def test_a_refill_leaves_out_what_the_batch_holds_and_loses_nothing() -> None:
    source = PromptSource(prompts(6), seed=2)
    batch = ids(source.take(4))
    refill = ids(source.take(2, exclude=batch))
    assert sorted(batch + refill) == [f"p{index}" for index in range(6)]
    late = PromptSource(prompts(6), seed=2)
    late.take(5)
    excluded = ids(late.take(1, exclude=["p0", "p1", "p2", "p3", "p4"]))
    assert excluded == ["p5"]


def test_fewer_prompts_than_a_batch_is_refused_with_the_number_that_works() -> None:
    with pytest.raises(ConfigError, match="batch of 8 .*rollout.prompts = 7 or fewer"):
        PromptSource(prompts(7), seed=0).take(8)


@pytest.mark.parametrize(
    "other",
    [PromptSource(prompts(8), 0), PromptSource(prompts(7), 1), PromptSource(prompts(7), 0, shuffle=False)],
)
def test_h31_a_position_of_another_prompt_list_seed_or_order_is_refused(other: PromptSource) -> None:
    with pytest.raises(ConfigError, match="other prompts, another seed"):
        PromptSource(prompts(7), 0).restore(other.position)
