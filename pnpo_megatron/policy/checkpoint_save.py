"""Writes a sharded checkpoint in three phases, of which the long one needs no other rank and may run beside
training: plan and copy to the host, write, publish.

Megatron's own writer forks processes, which outlive a killed trainer, inherit its pipes, and are waited for
without a deadline; here a thread writes. No rank ever writes to the disk in the middle of a collective: a
full disk is an error that all ranks agree on.
"""

import json
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer import MegatronOptimizer

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.stream import unwrapped
from pnpo_megatron.durable import sync_path
from pnpo_megatron.errors import CheckpointError
from pnpo_megatron.manifest import Digest, digest, write_manifest
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.parallel.rank_zero import from_rank_zero, gather_from_all
from pnpo_megatron.policy.checkpoint_plan import plan_save, storage_of
from pnpo_megatron.policy.random_state import random_file, random_state, write_random_state

ARCHITECTURE_FILE = "architecture.json"
HF_FILES = "hf"


class CheckpointSave:
    """One checkpoint on its way to the disk. Collective: make it, and `finish` it, on every rank."""

    def __init__(
        self,
        folder: Path,
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        groups: ParallelGroups,
        *,
        portable: bool = True,
        source: HfFolder | None = None,
        write_more: Callable[[Path], None] | None = None,
        background: bool = False,
    ) -> None:
        """Plan, copy what is needed, and start writing.

        Args:
            folder: the final name; until `finish` has renamed it, everything is in ``folder.tmp``.
            chunks: model chunks, wrapped in DDP or not.
            optimizer: None saves weights only.
            portable: the optimizer state loads under any layout, at the price of gathering it over
                data-parallel ranks; otherwise only model-parallel sizes as now will do.
            source: HF folder whose small files are stored along, for conversion without it.
            write_more: called on rank 0 with the unpublished folder, to add what belongs to the checkpoint.
            background: copy to host memory and return while a thread writes.

        Raises:
            CheckpointError: the folder cannot be made. Every rank raises it.
        """
        self.folder, self._groups, self._source, self._write_more = folder, groups, source, write_more
        self._partial = folder.with_name(folder.name + ".tmp")
        self._arch: Architecture = unwrapped(chunks[0]).arch  # type: ignore[assignment]
        self._error = ""
        self._written: list[Any] = []
        self._digests: dict[str, Digest] = {}
        self._on_rank_zero(lambda: _make_empty(self._partial))
        self._plan = plan_save(self._partial, chunks, optimizer, groups, portable=portable)
        self._random = random_state()
        self._buckets = FileSystemWriterAsync.preload_tensors(self._plan.writer.write_buckets, False)
        if background:
            self._buckets = [_copied(bucket, self._plan.storages) for bucket in self._buckets]
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        if background:
            self._thread.start()
        else:
            self._write()

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write. Not collective."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Until this rank has written. Not collective: for a run that fails while it saves, as a thread that
        still writes when the interpreter ends aborts the process, and its exit code is lost.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def finish(self, timeout_s: float = 1800.0) -> None:
        """Wait until every rank has written, then publish. Collective.

        Raises:
            CheckpointError: on every rank, if any could not write; nothing is published, and what was
                published before stands.
        """
        self.wait(timeout_s)
        if self._thread.is_alive():
            self._error = f"not written after {timeout_s:g} s (run.timeout_s)"
        ranks = gather_from_all((self._error, self._written, self._digests), self._groups.control)
        failed = [f"rank {rank}: {error}" for rank, (error, _, _) in enumerate(ranks) if error]
        if failed:
            self._on_rank_zero(lambda: shutil.rmtree(self._partial, ignore_errors=True))
            raise CheckpointError(f"{self.folder} could not be saved: {'; '.join(failed)}")
        results = [written for _, written, _ in ranks]
        digests = {name: entry for _, _, part in ranks for name, entry in part.items()}
        self._on_rank_zero(lambda: self._publish(results, digests))

    def _write(self) -> None:
        """This rank's files, and on rank 0 the small ones. No collective; an error is told by `finish`."""
        try:
            names = [random_file(self._groups.world_rank)]
            for index, bucket in enumerate(self._buckets):
                names.append(bucket[1])
                self._written += _write_bucket(index, bucket, self._plan.writer)
            write_random_state(self._partial, self._groups.world_rank, self._random)
            if self._groups.world_rank == 0:
                before = set(names)
                self._write_small_files()
                present = {str(p.relative_to(self._partial)) for p in files_of(self._partial)}
                names += sorted(name for name in present - before if not _of_a_rank(name))
            for name in names:
                sync_path(self._partial / name)
            self._digests = {name: digest(self._partial / name) for name in names}
        except Exception as error:  # told to every rank, by `finish`
            self._error = f"{type(error).__name__}: {error}; {_room(self._partial)}"
        self._buckets = []

    def _write_small_files(self) -> None:
        (self._partial / COMMON_STATE_FNAME).write_bytes(self._plan.common)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._partial))
        write_description(self._partial, self._arch, self._source)
        if self._write_more is not None:
            self._write_more(self._partial)

    def _publish(self, written: list[list[Any]], digests: dict[str, Digest]) -> None:
        """Write what only now is known, flush, swap names; a folder of that name, left by a crash, gives
        way."""
        del self._plan.metadata.all_local_plans  # every rank's plan, of use only to the next save
        self._plan.writer.finish(self._plan.metadata, written)
        digests[".metadata"] = digest(self._partial / ".metadata")
        write_manifest(self._partial, digests)
        sync_path(self._partial / ".metadata")
        for path in [self._partial, *(path for path in self._partial.rglob("*") if path.is_dir())]:
            sync_path(path)
        stale = self.folder.with_name(self.folder.name + ".old.tmp")
        shutil.rmtree(stale, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(stale)
        self._partial.rename(self.folder)
        sync_path(self.folder.parent)
        shutil.rmtree(stale, ignore_errors=True)

    def _on_rank_zero(self, work: Callable[[], None]) -> None:
        """An error there is the same CheckpointError everywhere."""

        def attempt() -> str:
            try:
                work()
            except OSError as error:
                return f"{self.folder} could not be saved: {error}"
            return ""

        failure = from_rank_zero(attempt, self._groups.control, f"saving {self.folder}")
        if failure:
            raise CheckpointError(failure)


def _write_bucket(index: int, bucket: Any, writer: Any) -> list[Any]:
    """One file, flushed to the disk; the places of its tensors."""
    results: queue.Queue[Any] = queue.Queue()
    count: queue.Queue[int] = queue.Queue()
    count.put(index)
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    with without_crc():
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, results, count, True)
    _, outcome = results.get_nowait()
    if isinstance(outcome, Exception):
        raise outcome
    places: list[Any] = outcome
    return places


def _room(folder: Path) -> str:
    """A full disk reaches us as an error of torch's archive writer that does not say so."""
    free = shutil.disk_usage(folder).free
    return f"{free / 2**20:,.1f} MiB are free there{', so the disk is full' if free < 2**20 else ''}"


def _copied(bucket: Any, live: set[int]) -> Any:
    """A bucket that training cannot change any more.

    Megatron copies what it gets from a GPU, and views; a tensor that still lies in a storage of the state is
    copied here.
    """
    path, name, (values, tensors) = bucket
    copies = [(item, one.clone() if storage_of(one) in live else one) for item, one in tensors]
    return path, name, (values, copies)


def _of_a_rank(name: str) -> bool:
    """Files that the ranks write and list themselves."""
    return name.endswith(".distcp") or name.startswith("random/")


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_description(folder: Path, arch: Architecture, source: HfFolder | None) -> None:
    """What the weights are of, and the small files of the HF folder they came from, into a checkpoint."""
    described = json.dumps(asdict(arch), indent=2) + "\n"
    (folder / ARCHITECTURE_FILE).write_text(described, encoding="utf-8")
    if source is not None:
        (folder / HF_FILES).mkdir()
        for path in source.other_files():
            shutil.copyfile(path, folder / HF_FILES / path.name)


def files_of(folder: Path) -> list[Path]:
    """All files, at any depth."""
    return [path for path in folder.rglob("*") if path.is_file()]


@contextmanager
def without_crc() -> Iterator[None]:
    """torch.save without a CRC-32 of all data, which takes as long as writing it: a manifest has SHA-256."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
