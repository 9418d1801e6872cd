"""Where a run stands: what a checkpoint must say beside the weights, and which checkpoint to go on from."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

STATE_FILE = "run_state.json"


@dataclass(frozen=True)
class RunState:
    """Position of a run after `step` finished rollout batches."""

    step: int = 0
    update: int = 0
    """Rows written, taken or skipped: steps x K x M at the end."""
    prompts: dict[str, Any] = field(default_factory=dict)
    """Position in the prompt order."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl, so that a resumed run continues the same file."""

    def advanced(self, **changes: Any) -> RunState:
        """The state with some fields moved on."""
        return replace(self, **changes)

    def write(self, folder: Path) -> None:
        """Store the state in a checkpoint folder that is not published yet."""
        with (folder / STATE_FILE).open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> RunState:
        """The state of a complete checkpoint."""
        return RunState(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` lives."""
    return run_folder / "checkpoints" / f"step_{step:06d}"


def publish(run_folder: Path, checkpoint: Path, keep: int) -> None:
    """Name a complete checkpoint as the newest, then (never before) remove the ones past `keep`."""
    staged = run_folder / "latest.tmp"
    staged.write_text(checkpoint.name + "\n", encoding="utf-8")
    os.replace(staged, run_folder / "latest")
    for stale in complete_checkpoints(run_folder)[:-keep]:
        shutil.rmtree(stale)


def complete_checkpoints(run_folder: Path) -> list[Path]:
    """Checkpoints published whole, oldest first; an unfinished one has another name or no state file."""
    folders = sorted((run_folder / "checkpoints").glob("step_*"))
    return [folder for folder in folders if folder.suffix != ".tmp" and (folder / STATE_FILE).is_file()]


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The checkpoint `latest` names, or the newest complete one if that is gone; None for a fresh run."""
    complete = complete_checkpoints(run_folder)
    pointer = run_folder / "latest"
    if pointer.is_file():
        named = run_folder / "checkpoints" / pointer.read_text(encoding="utf-8").strip()
        if named in complete:
            return named
    return complete[-1] if complete else None
