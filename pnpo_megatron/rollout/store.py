"""Rollout files: a JSON Lines file for people and a safetensors file for replay, one pair a step."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pnpo_megatron.durable import write_text_whole, write_whole
from pnpo_megatron.errors import DataError
from pnpo_megatron.types import RolloutBatch, SequenceRecord, TrainSequence


def to_arrays(batch: RolloutBatch) -> dict[str, Tensor]:
    """A batch as flat arrays: [N] over all tokens, `lengths` and `advantages` over sequences."""
    sequences = batch.sequences
    arrays = {
        "ids": torch.cat([s.ids for s in sequences]).to(torch.int32),
        "response_mask": torch.cat([s.response_mask for s in sequences]).to(torch.uint8),
        "rollout_logprobs": torch.cat([s.rollout_logprobs for s in sequences]),
        "lengths": torch.tensor([len(s.ids) for s in sequences]),
        "advantages": torch.tensor([s.advantage for s in sequences], dtype=torch.float64),
    }
    for name in ("old_logprobs", "reference_logprobs", "routes"):
        known = [value for s in sequences if (value := getattr(s, name)) is not None]
        if known:
            arrays[name] = torch.cat(known)
    return arrays


def from_arrays(
    step: int, arrays: dict[str, Tensor], records: Sequence[SequenceRecord], *, frozen: bool = False
) -> RolloutBatch:
    """The inverse of `to_arrays`; old log-probs only if `frozen`: a learner that replays scores them
    itself."""
    lengths = arrays["lengths"].tolist()
    routes = arrays["routes"].split(lengths) if "routes" in arrays else [None] * len(lengths)
    columns = zip(
        arrays["ids"].long().split(lengths),
        arrays["response_mask"].bool().split(lengths),
        arrays["rollout_logprobs"].split(lengths),
        arrays["advantages"].tolist(),
        routes,
        strict=True,
    )
    sequences = tuple(
        TrainSequence(ids, mask, logprobs, advantage, routes=chosen)
        for ids, mask, logprobs, advantage, chosen in columns
    )
    batch = RolloutBatch(step, sequences, tuple(records), tuple(record.group for record in records))
    if not frozen:
        return batch
    if "reference_logprobs" in arrays:
        batch = batch.with_reference_logprobs(arrays["reference_logprobs"].split(lengths))
    return batch.with_old_logprobs(arrays["old_logprobs"].split(lengths))


class RolloutStore:
    """Writes a run's rollouts in the background and reads another run's for replay."""

    def __init__(self, run_folder: Path, keep: int = 0) -> None:
        """`keep`: binary files to keep, 0 for all."""
        self.folder = run_folder / "rollouts"
        self._keep = keep
        self.needed_from: int | None = None
        """Files of this step and later stay in any case: a run that is killed goes on with them."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._pending: Future[None] | None = None

    def write(self, batch: RolloutBatch, note: Mapping[str, str] | None = None) -> None:
        """Start writing; waits for (and reports the failure of) the write before it.

        Args:
            note: stored with the binary file, for `held`.
        """
        self.flush()
        self._pending = self._writer.submit(self._write, batch, note)

    def flush(self) -> None:
        """Wait until everything is on disk."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Finish what is being written and end the writer."""
        self.flush()
        self._writer.shutdown()

    def held(self, step: int, run: str) -> tuple[RolloutBatch, dict[str, str]] | None:
        """The batch and note of a step, if they were stored under this note's ``run`` and are undamaged."""
        text, binary = self._paths(step)
        try:
            with safe_open(binary, "pt") as file:
                note = dict(file.metadata() or {})
            if note.get("run") != run or note["digest"] != _digest(text, load_file(binary)):
                return None
            return self.read(step), note
        except (OSError, SafetensorError, DataError):
            return None

    def copy(self, step: int, folder: Path) -> None:
        """Put a step's files into another folder, for `RolloutStore(folder).read`."""
        (folder / self.folder.name).mkdir(parents=True)
        for path in self._paths(step):
            shutil.copyfile(path, folder / self.folder.name / path.name)

    def read(self, step: int, *, frozen: bool = False) -> RolloutBatch:
        """The stored batch of one step, with its old log-probs if `frozen`.

        Raises:
            DataError: the step was never stored, or its binary file is gone.
        """
        text, binary = self._paths(step)
        for path in (text, binary):
            if not path.is_file():
                raise DataError(
                    f"{path}: missing, so step {step} cannot be replayed; point rollout.replay at a run made "
                    "with rollout.keep = 0, or lower steps to the last one stored"
                )
        rows = [json.loads(line) for line in text.read_text(encoding="utf-8").split("\n") if line]
        records = [SequenceRecord(**{k: v for k, v in row.items() if k != "advantage"}) for row in rows]
        return from_arrays(step, load_file(binary), records, frozen=frozen)

    def _write(self, batch: RolloutBatch, note: Mapping[str, str] | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text, binary = self._paths(batch.step)
        rows = (
            asdict(record) | {"advantage": sequence.advantage}
            for record, sequence in zip(batch.records, batch.sequences, strict=True)
        )
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text_whole(text, content)
        arrays = to_arrays(batch)
        about = {**(note or {}), "digest": _digest(text, arrays)}
        write_whole(binary, lambda staged: save_file(arrays, staged, about))
        if self._keep:
            for stale in sorted(self.folder.glob("step_*.safetensors"))[: -self._keep]:
                if self.needed_from is None or int(stale.stem.split("_")[1]) < self.needed_from:
                    stale.unlink()

    def _paths(self, step: int) -> tuple[Path, Path]:
        name = f"step_{step:06d}"
        return self.folder / f"{name}.jsonl", self.folder / f"{name}.safetensors"


def _digest(text: Path, arrays: Mapping[str, Tensor]) -> str:
    checksum = hashlib.sha256(text.read_bytes())
    for name in sorted(arrays):
        checksum.update(arrays[name].numpy().tobytes())
    return checksum.hexdigest()
