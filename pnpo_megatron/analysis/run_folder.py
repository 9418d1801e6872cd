"""What the instruments read of a run folder, while the run is going or after it."""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pnpo_megatron.errors import DataError

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Metrics and settings of one run."""

    path: Path
    config: dict[str, Any]
    """The resolved settings; empty if there is no config.toml."""
    updates: tuple[Row, ...]
    """One row an optimizer update, taken or skipped, in order."""
    evals: tuple[Row, ...]
    """One row an evaluation; step 0 is the one before training."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.resolve().name

    def setting(self, key: str) -> Any:
        """The value of ``section.key``, or None where the settings have none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def steps(self) -> dict[int, list[Row]]:
        """Update rows by step, in order."""
        grouped: dict[int, list[Row]] = {}
        for row in self.updates:
            grouped.setdefault(int(row["step"]), []).append(row)
        return grouped


def read_run(path: str | Path) -> RunFolder:
    """Read ``metrics.jsonl`` and ``config.toml``; a last line that is still being written is left out.

    Raises:
        DataError: no such folder, no metrics in it, or a line that is not JSON.
    """
    folder = Path(path)
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError(f"{metrics}: no such file; give a run folder of `pnpo-megatron train`")
    rows = list(_rows(metrics))
    settings = folder / "config.toml"
    config = tomllib.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    return RunFolder(
        path=folder,
        config=config,
        updates=tuple(row for row in rows if row.get("kind") == "update"),
        evals=tuple(row for row in rows if row.get("kind") == "eval"),
    )


def number(row: Row, key: str) -> float | None:
    """The value of a metric as a float; None if it is absent or was not finite."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None


def last(rows: Iterable[Row], key: str) -> float | None:
    """The newest finite value of a metric."""
    values = [value for row in rows if (value := number(row, key)) is not None]
    return values[-1] if values else None


def _rows(metrics: Path) -> Iterable[Row]:
    text = metrics.read_text(encoding="utf-8")
    complete = text if text.endswith("\n") else text[: text.rfind("\n") + 1]
    for line_number, line in enumerate(complete.splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{metrics}, line {line_number}: not JSON ({error.msg}); the file was cut or "
                "edited, so remove that line"
            ) from error
        yield row
