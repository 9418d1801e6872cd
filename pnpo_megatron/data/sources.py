"""Rows of prompt files: JSON Lines and DAPO-Math-17k's parquet columns, each row with the place it came
from."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pnpo_megatron.errors import DataError

Message = tuple[str, str]
"""(role, content)."""
_PARQUET_COLUMNS = ("prompt", "reward_model", "extra_info")
_JSONL_EXAMPLE = '{"id": "a-1", "problem": "What is 2+2?", "answer": "4"}'
_OWN_KEYS = ("id", "problem", "answer")


@dataclass(frozen=True)
class Row:
    """One line or parquet row: a conversation to continue and its gold answer."""

    id: str
    messages: tuple[Message, ...]
    answer: str
    where: str
    """File and line (or row) number, for messages to people."""
    meta: Mapping[str, str] = field(default_factory=dict)
    file: int = 0
    """Index among several files."""


def read_rows(path: Path) -> Iterator[Row]:
    """All rows of a ``.parquet`` or JSON Lines file, in file order.

    Raises:
        DataError: no such file, no rows, or a bad row, named by its number.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a JSON Lines or parquet file of prompts")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{path}: the file is empty; expected lines such as {_JSONL_EXAMPLE}")


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        lines = enumerate(file, start=1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: not UTF-8 text ({error.reason}); is it a parquet file?") from error
            if line.strip():
                yield _jsonl_row(line, f"{path}:{number}", f"{path.stem}-{number}")


def _jsonl_row(line: str, where: str, default_id: str) -> Row:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); expected a line such as {_JSONL_EXAMPLE}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}; expected a line such as {_JSONL_EXAMPLE}")
    problem = _text(record, "problem", where)
    meta = {key: value if isinstance(value, str) else json.dumps(value)
            for key, value in record.items() if key not in _OWN_KEYS}  # fmt: skip
    row_id = _text(record, "id", where) if "id" in record else default_id
    return Row(row_id, (("user", problem),), _text(record, "answer", where), where, meta)


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    """A non-empty string, or an integer written as one."""
    if key not in record:
        raise DataError(
            f"{where}: key {key!r} is missing (found: {', '.join(record)}); e.g. {_JSONL_EXAMPLE}"
        )
    value = record[key]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {key} is {value!r}; expected a non-empty string")
    return value


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file ({error})") from error
    with file:
        missing = [name for name in _PARQUET_COLUMNS[:2] if name not in file.schema_arrow.names]
        if missing:
            raise DataError(
                f"{path}: columns {missing} are missing (found: {', '.join(file.schema_arrow.names)}); "
                "expected DAPO-Math-17k's: prompt [{content, role}], reward_model {ground_truth}, extra_info "
                "{index}"
            )
        number = 0
        for batch in file.iter_batches(batch_size=4096):
            for record in batch.to_pylist():
                number += 1
                yield _parquet_row(record, f"{path}: row {number}", f"{path.stem}-{number}")


def _parquet_row(record: Mapping[str, Any], where: str, default_id: str) -> Row:
    try:
        messages = tuple((str(message["role"]), str(message["content"])) for message in record["prompt"])
        answer = record["reward_model"]["ground_truth"]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{where}: {type(error).__name__} {error}; expected prompt [{{content, role}}] and reward_model "
            "{ground_truth}"
        ) from error
    if not messages or not isinstance(answer, str) or not answer.strip():
        raise DataError(f"{where}: {len(messages)} messages and answer {answer!r}; expected both")
    index = (record.get("extra_info") or {}).get("index")
    meta = {key: value for key in ("data_source", "ability") if isinstance(value := record.get(key), str)}
    return Row(default_id if index is None else str(index), messages, answer, where, meta)
