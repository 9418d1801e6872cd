"""Whole checkpoints from HF folders and back, in one process: what `tools/checkpoint_convert` calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from pnpo_megatron.convert.dry_run import check_space, describe
from pnpo_megatron.convert.hf_folder import HfFolder, write_hf_folder
from pnpo_megatron.convert.stream import export_hf, load_hf_weights
from pnpo_megatron.errors import ConversionError
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.policy.checkpoint import HF_FILES, checkpoint_content, load_checkpoint, save_checkpoint
from pnpo_megatron.policy.model import PolicyModel, build_model, output_weight
from pnpo_megatron.policy.process_groups import (
    ParallelSettings,
    initialize_parallel,
    release_parallel,
    start_distributed,
)


@dataclass(frozen=True)
class Plan:
    """What a conversion will do, known from headers alone."""

    source: HfFolder
    out: Path
    dtype: torch.dtype

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
    plan = Plan(source, out, dtype or stored_dtype(megatron))
    check_space(source.architecture, plan.dtype, out)
    return plan


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Raise a ConversionError where the target exists and may not be replaced."""
    if out.exists() and not overwrite:
        raise ConversionError(f"{out} exists already; choose another folder or pass --overwrite")


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


def stored_dtype(megatron: Path) -> torch.dtype:
    """The dtype of a checkpoint's embedding, from its metadata."""
    tensors = dist_checkpointing.load_tensors_metadata(str(megatron))
    dtype: torch.dtype = tensors["embedding.word_embeddings.weight"].dtype
    return dtype


@contextmanager
def one_process() -> Iterator[ParallelGroups]:
    """Megatron's groups in this process alone."""
    start_distributed()
    try:
        yield initialize_parallel(ParallelSettings(), seed=0)
    finally:
        release_parallel()
        dist.destroy_process_group()


def hf_to_megatron(plan: Plan) -> None:
    """Write the checkpoint of a plan: weights only, loadable under any layout."""
    with one_process() as groups:
        chunks = build_model(plan.source.architecture, ParallelSettings(), dtype=plan.dtype)
        load_hf_weights(chunks, plan.source, groups)
        save_checkpoint(plan.out, chunks, None, groups, source=plan.source)


def megatron_to_hf(plan: Plan, megatron: Path, *, overwrite: bool) -> None:
    """Write the HF folder of a plan."""
    with one_process() as groups:
        chunks = load_model(megatron, stored_dtype(megatron), groups)
        tensors = export_hf(chunks, plan.source.architecture, groups, dtype=plan.dtype)
        write_hf_folder(plan.out, plan.source, tensors, dtype=plan.dtype, overwrite=overwrite)


def load_model(megatron: Path, dtype: torch.dtype, groups: ParallelGroups) -> list[PolicyModel]:
    """The model of a checkpoint, in this process."""
    chunks = build_model(stored_hf_files(megatron).architecture, ParallelSettings(), dtype=dtype)
    load_checkpoint(megatron, chunks, None, groups)
    return chunks


def sequence_logits(model: PolicyModel, ids: Tensor) -> Tensor:
    """[n, V] float32 logits of one sequence [n], n even: for comparisons, not for training."""
    lengths = torch.tensor([0, len(ids)], dtype=torch.int32, device=ids.device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
        cu_seqlens_q_padded=lengths,
        cu_seqlens_kv_padded=lengths,
        max_seqlen_q=len(ids),
        max_seqlen_kv=len(ids),
    )
    positions = torch.arange(len(ids), device=ids.device)
    with torch.no_grad():
        hidden = model(ids[None], positions[None], attention_mask=None, packed_seq_params=packed)[0]
        return hidden.float() @ output_weight(model)[: model.arch.vocab].float().T


def largest_differences(
    model: PolicyModel, hf: HfFolder, groups: ParallelGroups
) -> Iterator[tuple[str, float]]:
    """For every HF tensor, the largest absolute difference between a model and a folder; NaN where they
    differ in NaNs."""
    for name, tensor in export_hf([model], hf.architecture, groups):
        wanted = hf.tensor(name).to(tensor.dtype)
        same = torch.equal(tensor, wanted)
        yield name, 0.0 if same else float((tensor.double() - wanted.double()).abs().max())
