"""Fetches DAPO-Math-17k, AIME 2024, AIME 2025 and AMC 2023 from the Hugging Face hub and writes our formats.

pip install -e ".[data]"
python prepare_data.py            # writes data/ beside this file: prompts.jsonl and three benchmarks
python prepare_data.py --local D  # the same from D/NAME.parquet or .jsonl, where there is no network
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Source:
    """A data set of the hub, and the columns we read."""

    repository: str
    split: str
    problem: str
    answer: str
    count: int
    """Distinct problems, 0 if not checked."""


BENCHMARKS = {
    "aime24": Source("HuggingFaceH4/aime_2024", "train", "problem", "answer", 30),
    "aime25": Source("math-ai/aime25", "test", "problem", "answer", 30),
    "amc23": Source("math-ai/amc23", "test", "question", "answer", 40),
}
PROMPTS = Source("BytedTsinghua-SIA/DAPO-Math-17k", "train", "prompt", "reward_model", 0)


class SourceError(ValueError):
    """A data set does not look as expected."""


def fetch(source: Source, name: str, local: Path | None) -> Iterable[Mapping[str, Any]]:
    """Rows of a data set, from the hub or from a local file of the same columns."""
    from datasets import load_dataset

    if local is None:
        return load_dataset(source.repository, split=source.split)  # type: ignore[no-any-return]
    for ending, kind in ((".parquet", "parquet"), (".jsonl", "json")):
        if (path := local / f"{name}{ending}").is_file():
            return load_dataset(kind, data_files=str(path), split="train")  # type: ignore[no-any-return]
    raise SourceError(f"{local}: neither {name}.parquet nor {name}.jsonl is there")


def benchmark_rows(name: str, source: Source, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Distinct problems with their bare golds (27.0 becomes 27, 025 becomes 25).

    Raises:
        SourceError: a column is missing, or another number of problems than the benchmark has.
    """
    golds: dict[str, str] = {}
    for row in rows:
        problem, answer = (str(_column(name, row, key)).strip() for key in (source.problem, source.answer))
        golds.setdefault(problem, whole_number(answer))
    if source.count and len(golds) != source.count:
        raise SourceError(
            f"{name}: {len(golds)} distinct problems, expected {source.count}; another version?"
        )
    return [
        {"id": f"{name}-{number:02d}", "problem": problem, "answer": answer, "source": source.repository}
        for number, (problem, answer) in enumerate(golds.items(), start=1)
    ]


def prompt_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Distinct (prompt, gold) rows of DAPO-Math-17k, which repeats each a hundred times.

    A prompt with two golds stays twice: data.conflicts says what becomes of it.
    """
    seen: set[tuple[str, str]] = set()
    for row in rows:
        (message,) = _column("prompts", row, "prompt")
        problem = str(message["content"])
        answer = str(_column("prompts", row, "reward_model")["ground_truth"]).strip()
        if (problem, answer) not in seen:
            seen.add((problem, answer))
            yield {"id": f"dapo-{len(seen):05d}", "problem": problem, "answer": answer}


def whole_number(text: str) -> str:
    """An integer in its shortest form; anything else as it stands."""
    try:
        value = float(text)
    except ValueError:
        return text
    return str(int(value)) if value.is_integer() else text


def _column(name: str, row: Mapping[str, Any], key: str) -> Any:
    if key not in row:
        raise SourceError(f"{name}: no column {key!r}, only {', '.join(row)}; the data set has changed")
    return row[key]


def write(path: Path, rows: Iterable[Mapping[str, str]]) -> int:
    """Write JSON Lines, whole or not at all; the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged, count = path.with_suffix(".tmp"), 0
    with staged.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    staged.replace(path)
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: 0 done, 2 a data set is not there or not as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument(
        "--local", type=Path, help="folder of prompts, aime24, aime25, amc23 (.parquet or .jsonl)"
    )
    args = parser.parse_args(argv)
    try:
        for name, source in BENCHMARKS.items():
            rows = benchmark_rows(name, source, fetch(source, name, args.local))
            print(f"{args.out / name}.jsonl: {write(args.out / f'{name}.jsonl', rows)} problems")
        distinct = prompt_rows(fetch(PROMPTS, "prompts", args.local))
        print(f"{args.out / 'prompts.jsonl'}: {write(args.out / 'prompts.jsonl', distinct)} distinct rows")
    except ImportError:
        print('error: the package datasets is missing: pip install -e ".[data]"', file=sys.stderr)
        return 2
    except (SourceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
