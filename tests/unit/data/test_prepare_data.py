"""The example's data script on local files of the columns that the hub has."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pyarrow import Table, parquet
from toy_tokenizer import toy_tokenizer

from pnpo_megatron.data.prompts import load_prompts

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_data", ROOT / "examples/pnpo_1p5b/prepare_data.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare_data"] = module
    spec.loader.exec_module(module)
    return module


def dapo_row(problem: str, gold: str, index: str) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": problem, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": gold, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def local_files(folder: Path) -> Path:
    """Rows repeated as they are published: AIME 32 times, DAPO a hundred times; one prompt has two golds."""
    aime = [{"id": i, "problem": f"problem {i}", "answer": f"{i:03d}", "year": "2024"} for i in range(30)]
    parquet.write_table(Table.from_pylist(aime * 32), folder / "aime24.parquet")
    later = [{"problem": f"later {i}", "answer": i, "id": str(i)} for i in range(30)]
    (folder / "aime25.jsonl").write_text("".join(json.dumps(row) + "\n" for row in later))
    amc = [{"id": i, "question": f"question {i}", "answer": float(i), "url": "u"} for i in range(40)]
    parquet.write_table(Table.from_pylist(amc), folder / "amc23.parquet")
    rows = [dapo_row("one", "1", "a"), dapo_row("two", "2", "b"), dapo_row("two", "3", "c")]
    parquet.write_table(Table.from_pylist(rows * 100), folder / "prompts.parquet")
    return folder


def check_written(out: Path) -> None:
    tokenizer = toy_tokenizer()
    prompts = load_prompts(out / "prompts.jsonl", tokenizer, template="raw", conflicts="drop")
    assert [prompt.problem for prompt in prompts.prompts] == ["one"] and prompts.summary.conflicts == 2
    for name, count, first in (
        ("aime24", 30, "problem 7"),
        ("aime25", 30, "later 7"),
        ("amc23", 40, "question 7"),
    ):
        loaded = load_prompts(out / f"{name}.jsonl", tokenizer, template="raw").prompts
        assert len(loaded) == count
        assert (loaded[7].problem, loaded[7].answer, loaded[7].id) == (first, "7", f"{name}-08")


def test_local_files_of_the_hubs_columns_become_our_formats(tmp_path, script, monkeypatch):
    """Whole command; `datasets` is optional, and where it is absent pyarrow reads the same files."""
    try:
        import datasets  # noqa: F401
    except ImportError:

        def read(source, name, local):
            path = local / f"{name}.parquet"
            if path.is_file():
                return parquet.read_table(path).to_pylist()
            return [json.loads(line) for line in (local / f"{name}.jsonl").read_text().splitlines()]

        monkeypatch.setattr(script, "fetch", read)
    (tmp_path / "in").mkdir()
    assert script.main(["--local", str(local_files(tmp_path / "in")), "--out", str(tmp_path / "out")]) == 0
    check_written(tmp_path / "out")


def test_a_changed_data_set_is_named(script):
    source = script.BENCHMARKS["amc23"]
    with pytest.raises(script.SourceError, match="amc23: no column 'question', only problem"):
        script.benchmark_rows("amc23", source, [{"problem": "p"}])
    with pytest.raises(script.SourceError, match="amc23: 1 distinct problems, expected 40"):
        script.benchmark_rows("amc23", source, [{"question": "p", "answer": 3.0}] * 40)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("27.0", "27"), ("025", "25"), ("1.5", "1.5"), ("\\frac{1}{2}", "\\frac{1}{2}"), ("0", "0")],
)
def test_golds_are_bare(script, text, expected):
    assert script.whole_number(text) == expected


def test_without_datasets_the_command_says_what_to_install(tmp_path, script, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert script.main(["--out", str(tmp_path)]) == 2
    assert 'pip install -e ".[data]"' in capsys.readouterr().err
