"""Where a run stands: what a checkpoint must say beside the weights, which checkpoint to go on from, which to
keep."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pnpo_megatron.durable import write_text_whole
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.manifest import MANIFEST_FILE
from pnpo_megatron.types import Counts

STATE_FILE = "run_state.json"


@dataclass(frozen=True)
class RunState(Counts):
    """What a checkpoint says of the run beside weights, optimizer and random states."""

    inside: bool = False
    """The batch of `step` + 1 is in work; it lies in the checkpoint, frozen."""
    ahead: str = ""
    """Names the next batch, if it was sampled already with older weights (rollout.max_lag)."""
    prompts: dict[str, Any] = field(default_factory=dict)
    """Position in the prompt order."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl, so that a resumed run continues the same file."""
    score: float | None = None
    """eval/macro of these weights, if they were evaluated."""
    portable: bool = True
    """The optimizer state loads under any layout."""
    config: dict[str, Any] = field(default_factory=dict)
    """The settings, flat."""

    def write(self, folder: Path) -> None:
        """Store the state in a checkpoint folder that is not published yet."""
        (folder / STATE_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> RunState:
        """The state of a complete checkpoint."""
        return RunState(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))

    @property
    def place(self) -> str:
        """For people."""
        inside = f" and update {self.update} inside step {self.step + 1}" if self.inside else ""
        return f"step {self.step}{inside}"


def checkpoint_folder(run_folder: Path, step: int, inside: tuple[int, int] | None = None) -> Path:
    """Where the checkpoint after `step` lives; `inside`: (epoch, update) of a step that is not finished."""
    suffix = "_epoch_{}_update_{}".format(*inside) if inside else ""
    return run_folder / "checkpoints" / f"step_{step:06d}{suffix}"


def publish(run_folder: Path, checkpoint: Path, keep: int) -> None:
    """Name a complete checkpoint as the newest, then (never before) remove what is past `keep`.

    The newest `keep` stay, and of the older ones the best by evaluation and the newest that any layout loads.
    """
    write_text_whole(run_folder / "latest", checkpoint.name + "\n")
    states = {folder: state for folder in candidates(run_folder) if (state := state_of(folder))}
    kept = list(states)[:keep]
    scored = [folder for folder, state in states.items() if state.score is not None]
    kept += sorted(scored, key=lambda folder: states[folder].score or 0.0)[-1:]
    kept += [folder for folder, state in states.items() if state.portable][:1]
    for folder in states.keys() - set(kept):
        shutil.rmtree(folder)


def whole_checkpoints(run_folder: Path) -> list[Path]:
    """Checkpoints that were published whole, newest first."""
    folders = (run_folder / "checkpoints").glob("step_*")
    needed = (MANIFEST_FILE, STATE_FILE)
    whole = [one for one in folders if not one.suffix and all((one / name).is_file() for name in needed)]
    return sorted(whole, key=_position, reverse=True)


def candidates(run_folder: Path) -> list[Path]:
    """Checkpoints to go on from, in the order to try them: from the one that `latest` names.

    Those after it belong to a future that was given up (``--from``). Without `latest`: from the newest.
    """
    ordered = whole_checkpoints(run_folder)
    pointer = run_folder / "latest"
    latest = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else ""
    names = [folder.name for folder in ordered]
    return ordered[names.index(latest) :] if latest in names else ordered


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The first of `candidates`, undamaged or not; None for a fresh run."""
    return next(iter(candidates(run_folder)), None)


def _position(folder: Path) -> tuple[int, float]:
    """Order in the run, from the name alone: the updates of a step come before its end."""
    parts = folder.name.split("_")
    return int(parts[1]), float(parts[-1]) if len(parts) > 2 else math.inf


def state_of(folder: Path) -> RunState | None:
    """None if it is damaged: that is found, and named, when the checkpoint is to be used."""
    try:
        return RunState.read(folder)
    except (OSError, ValueError, TypeError):
        return None


def newest_sound(
    found: list[Path], problems: Callable[[Path], list[str]], pass_over: Callable[[Path, str], None]
) -> Path | None:
    """The first checkpoint without damage; None if there is none at all.

    Args:
        found: in the order to try.
        problems: what is wrong with one; nothing if it is sound.
        pass_over: called with every damaged one and what is wrong.

    Raises:
        ConfigError: there are checkpoints, and all are damaged: starting anew would be a surprise.
    """
    for checkpoint in found:
        wrong = problems(checkpoint)
        if not wrong:
            return checkpoint
        pass_over(checkpoint, "; ".join(wrong[:3]))
    if found:
        raise ConfigError(
            f"{found[0].parent}: no checkpoint is left that is not damaged; put one back, or give another "
            "run.folder to start anew"
        )
    return None


def is_complete(run_folder: Path, steps: int) -> bool:
    """Whether the newest checkpoint is the last."""
    newest = newest_checkpoint(run_folder)
    state = state_of(newest) if newest else None
    return state is not None and state.step >= steps


def set_aside(checkpoint: Path) -> None:
    """Rename a damaged checkpoint, for somebody to look at; nothing takes it for one any more."""
    target = checkpoint.with_name(checkpoint.name + ".damaged")
    shutil.rmtree(target, ignore_errors=True)
    checkpoint.rename(target)


def remove_unfinished(run_folder: Path) -> None:
    """What a killed run left half-written."""
    for folder in (run_folder / "checkpoints").glob("*.tmp"):
        shutil.rmtree(folder)


HARMLESS = (
    "run.", "checkpoint.", "export.", "eval.", "track.", "model.hf", "data.prompts", "reward.workers",
    "reward.max_fault_rate", "optimizer.max_skipped", "rollout.keep", "rollout.kv_cache_bytes",
    "rollout.max_num_seqs", "rollout.enforce_eager", "rollout.threads", "rollout.max_mismatch",
    "rollout.sync_check", "rollout.start_timeout_s", "rollout.generate_timeout_s", "rollout.sync_timeout_s",
    "rollout.restarts", "rollout.engine", "rollout.servers", "rollout.colocated",
    "rollout.weight_transfer",
)  # fmt: skip
"""Settings that do not touch the numbers. Model and prompts are compared by content, not by path."""
ROUNDING = (
    "parallel.", "batching.", "model.recompute", "model.attention_backend", "model.logprob_chunk",
    "model.grouped_experts",
    "optimizer.distributed", "optimizer.overlap_grad_reduce", "optimizer.overlap_param_gather",
    "rollout.overlap_logprobs",
)  # fmt: skip
"""Settings that change the order of additions and nothing else."""


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Settings that differ from those a checkpoint was written with.

    Args:
        saved, now: ``section.key`` to value; a key that one side lacks is not compared.

    Returns:
        Those that change the run, and those that change it within rounding, as ``key: old -> new``.
    """
    changes: list[str] = []
    rounding: list[str] = []
    for key in sorted(saved.keys() & now.keys()):
        reference = key == "model.hf" and now.get("objective.kl_coef")  # the first weights are read again
        if saved[key] == now[key] or key.startswith(HARMLESS) and not reference:
            continue
        if key == "steps" and now["optimizer.schedule"] == "constant":
            continue
        (rounding if key.startswith(ROUNDING) else changes).append(f"{key}: {saved[key]!r} -> {now[key]!r}")
    return changes, rounding


BOUND = ("parallel.tensor", "parallel.pipeline", "parallel.virtual_pipeline", "parallel.expert")
"""Sizes that an optimizer state which is not portable is tied to."""


def layout_refusal(state: RunState, now: Mapping[str, Any], whole: Sequence[Path]) -> str:
    """Why a checkpoint's optimizer state cannot be loaded under this layout, or nothing."""
    other = [key for key in BOUND if state.config.get(key, now[key]) != now[key]]
    if state.portable or not other:
        return ""
    sizes = ", ".join(f"{key} = {state.config[key]}" for key in other)
    portable = [folder for folder in whole if (one := state_of(folder)) and one.portable]
    text = f"the optimizer state after {state.place} loads under {sizes} only: set that back"
    if not portable:
        return text + "; no checkpoint that loads under any layout is left (checkpoint.portable_every)"
    lost = state.step - RunState.read(portable[0]).step
    return f"{text}, or add --from {portable[0].name}, which loads under any layout and loses {lost} steps"
