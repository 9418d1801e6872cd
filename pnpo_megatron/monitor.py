"""One flat row of metrics an update: to JSON Lines, TensorBoard and a progress bar."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

if TYPE_CHECKING:
    from pnpo_megatron.tracking import Tracker


class Monitor:
    """Writes the metrics of one run. Only rank 0 has one that is `active`; the others drop every row."""

    def __init__(
        self,
        folder: Path,
        *,
        total_updates: int,
        active: bool = True,
        resume_at_bytes: int | None = None,
        update: int = 0,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """`resume_at_bytes`: cut metrics.jsonl back to what the checkpoint saw, after `update` rows; None
        starts a new file."""
        self._active, self._trackers = active, list(trackers)
        self._file: IO[str] | None = None
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        self._console = Console(file=sys.stderr)
        if resume_at_bytes is None:
            path.write_bytes(b"")
        else:
            self._cut(path, resume_at_bytes)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._tensorboard = SummaryWriter(str(folder / "tb"), purge_step=update + 1 if update else None)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} updates"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task(
            "training", total=total_updates, completed=update, note=""
        )
        self._progress.start()
        self._latest: dict[str, float] = {}

    def flush(self) -> int:
        """See that all rows are on the disk. Their length: a checkpoint stores it, so that a resumed run
        continues the same file."""
        if self._file is None:
            return 0
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def log_update(self, *, step: int, epoch: int, update: int, metrics: Mapping[str, Any]) -> None:
        """One optimizer update, taken or skipped."""
        if not self._active:
            return
        self._write({"kind": "update", "step": step, "epoch": epoch, "update": update}, metrics, at=update)
        self._latest.update({key: value for key, value in metrics.items() if isinstance(value, float)})
        self._progress.update(self._task, completed=update, note=self._note())

    def log_eval(self, *, step: int, update: int, metrics: Mapping[str, Any]) -> None:
        """One evaluation; step 0 is the one before training."""
        if not self._active:
            return
        self._write({"kind": "eval", "step": step, "update": update}, metrics, at=update)
        scores = "  ".join(
            f"{key.removeprefix('eval/')} {value:.4f}"
            for key, value in metrics.items()
            if key.endswith(("avg_at_k", "macro"))
        )
        self.say(f"step {step}: {scores}")

    def log_step(self, step: int) -> None:
        """A line for logs where no progress bar can be drawn."""
        if self._active and not self._console.is_terminal:
            self.say(f"step {step}: {self._note()}")

    def say(self, message: str) -> None:
        """A sentence for the person who watches."""
        if self._active:
            self._console.print(message, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Flush everything."""
        if self._active and self._file:
            self._progress.stop()
            self._tensorboard.close()
            self._file.close()
            for tracker in list(self._trackers):
                self._track(tracker, tracker.close)

    def _cut(self, path: Path, size: int) -> None:
        """Rows past `size` belong to updates that are made again."""
        path.touch()
        with path.open("rb+") as file:
            there = file.seek(0, os.SEEK_END)
            if there < size:  # somebody cut or removed it: the rest of the run is still worth having
                self.say(f"{path} has {there} bytes, the checkpoint saw {size}: rows before it are missing")
                file.seek(0)
                size = file.read().rfind(b"\n") + 1
            file.truncate(size)

    def _write(self, head: dict[str, Any], metrics: Mapping[str, Any], at: int) -> None:
        assert self._file is not None
        row = head | {
            key: None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN
            for key, value in metrics.items()
        }
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
        for key, number in numbers.items():
            self._tensorboard.add_scalar(key, number, at)
        for tracker in list(self._trackers):
            self._track(tracker, partial(tracker.log, numbers, at))

    def _track(self, tracker: Tracker, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:  # whatever the tool raises: training goes on without it
            self._trackers.remove(tracker)
            self.say(f"{tracker.name} gets no more metrics: {type(error).__name__}: {error}")

    def _note(self) -> str:
        shown = {"reward/mean": "reward", "gate/rejected_fraction": "rejected", "loss": "loss"}
        return "  ".join(
            f"{short} {self._latest[key]:.4g}" for key, short in shown.items() if key in self._latest
        )
