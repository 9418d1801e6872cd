"""Whole checkpoints from HF folders and back, in one process: what `tools/checkpoint_convert` calls."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pnpo_megatron.convert.dry_run import check_space, describe, model_bytes
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.hf_writer import published_whole, refuse_existing, write_hf_folder
from pnpo_megatron.convert.progress import progress_bar
from pnpo_megatron.errors import ConversionError
from pnpo_megatron.manifest import MANIFEST_FILE, damage, digest, write_manifest
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.policy.checkpoint import HF_FILES, checkpoint_content
from pnpo_megatron.policy.checkpoint_save import files_of, write_description
from pnpo_megatron.policy.process_groups import (
    ParallelSettings,
    initialize_parallel,
    release_parallel,
    start_distributed,
)
from pnpo_megatron.policy.streaming import WeightsReader, write_weights

CONTENT = {"portable": True, "has_optimizer": False, "layout": {}}
"""What a converted checkpoint says of itself."""


@dataclass(frozen=True)
class Plan:
    """What a conversion will do, known from headers alone."""

    source: HfFolder
    out: Path
    dtype: torch.dtype

    @property
    def total_bytes(self) -> int:
        """Of all tensors to be written."""
        return model_bytes(self.source.architecture, self.dtype)

    def summary(self) -> str:
        """Family, shapes, bytes, time and target."""
        return describe(self.source.architecture, self.dtype, self.out)


def plan_hf_to_megatron(hf: Path, out: Path, dtype: torch.dtype | None, *, overwrite: bool) -> Plan:
    """Check source and target without reading a tensor.

    Raises:
        ConversionError: the folder cannot be converted, or the target exists.
    """
    source = HfFolder(hf)
    source.check_complete()
    refuse_existing(out, overwrite=overwrite)
    plan = Plan(source, out, dtype or source.dtype())
    check_space(source.architecture, plan.dtype, out)
    return plan


def plan_megatron_to_hf(megatron: Path, out: Path, dtype: torch.dtype | None, *, overwrite: bool) -> Plan:
    """Check a checkpoint and the target without reading a tensor.

    Raises:
        ConversionError: not a complete checkpoint with its HF files, or the target exists.
    """
    checkpoint_content(megatron)
    source = stored_hf_files(megatron)
    refuse_existing(out, overwrite=overwrite)
    plan = Plan(source, out, dtype or WeightsReader(megatron, source.architecture).dtype())
    check_space(source.architecture, plan.dtype, out)
    return plan


def stored_hf_files(megatron: Path) -> HfFolder:
    """The config and tokenizer files inside a checkpoint.

    Raises:
        ConversionError: it was saved without them.
    """
    if not (megatron / HF_FILES / "config.json").is_file():
        raise ConversionError(
            f"{megatron / HF_FILES} has no config.json; only checkpoints saved with it can be converted"
        )
    return HfFolder(megatron / HF_FILES)


@contextmanager
def one_process() -> Iterator[ParallelGroups]:
    """Megatron's groups in this process alone."""
    start_distributed()
    try:
        yield initialize_parallel(ParallelSettings(), seed=0)
    finally:
        release_parallel()
        dist.destroy_process_group()


def hf_to_megatron(plan: Plan, *, overwrite: bool = False) -> None:
    """Write the checkpoint of a plan, one tensor at a time: weights only, loadable under any layout."""
    source = plan.source
    with (
        published_whole(plan.out, overwrite=overwrite) as folder,
        progress_bar("writing", plan.total_bytes) as advance,
        one_process(),
    ):
        digests = write_weights(folder, source, plan.dtype, CONTENT, advance)
        write_description(folder, source.architecture, source)
        checkpoint_content(folder)  # can be read back
        others = {str(path.relative_to(folder)): path for path in files_of(folder)}
        digests |= {name: digest(path) for name, path in others.items() if name not in digests}
        write_manifest(folder, digests)


def refuse_damaged(megatron: Path) -> None:
    """Compare a checkpoint with its manifest, where it has one: torch checks no sum when it reads.

    Raises:
        ConversionError: naming the files.
    """
    wrong = damage(megatron) if (megatron / MANIFEST_FILE).exists() else []
    if wrong:
        raise ConversionError(f"{megatron} is damaged: {'; '.join(wrong[:3])}; copy it again")


def megatron_to_hf(plan: Plan, megatron: Path, *, overwrite: bool = False) -> None:
    """Write the HF folder of a plan, one tensor at a time.

    Raises:
        ConversionError: the checkpoint is not what was written, or not of its config.json.
    """
    with ThreadPoolExecutor(1) as beside, one_process():
        check = beside.submit(refuse_damaged, megatron)

        def checked(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            yield from tensors
            check.result()  # before anything is published

        try:
            weights = WeightsReader(megatron, plan.source.architecture)
            with progress_bar("writing", plan.total_bytes) as advance:
                tensors = checked(weights.tensors(plan.dtype, advance))
                write_hf_folder(plan.out, plan.source, tensors, dtype=plan.dtype, overwrite=overwrite)
        except Exception:
            check.result()  # damage explains whatever went wrong
            raise
