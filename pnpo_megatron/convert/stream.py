"""Full HF-named tensors from a live sharded model, one by one, and back: weight sync, export and loading.

Works on anything whose ``named_parameters`` carry Megatron's names; no Megatron import is needed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.families import all_rows, dtype_of
from pnpo_megatron.convert.family import EMBEDDING, HEAD, Row
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.layouts import Sizes, shard, unshard
from pnpo_megatron.errors import ConversionError
from pnpo_megatron.parallel.groups import ParallelGroups, group_rank, group_size

# TransformerEngine fuses each norm into the linear layer behind it and names it after that layer.
_ENGINE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_BUFFERS = ("router.expert_bias",)  # a buffer in Megatron, a tensor in HF
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=local_experts\.)\d+")


def sizes_of(arch: Architecture, padded_vocab: int) -> Sizes:
    """What the layouts need to know."""
    return Sizes(arch.heads, arch.kv_heads, arch.head_dim, arch.vocab, padded_vocab)


def local_parameters(
    chunks: Iterable[nn.Module], arch: Architecture, groups: ParallelGroups
) -> dict[str, Tensor]:
    """This rank's parameters by their name in the whole model: layers and experts counted globally.

    A wrapper's ``module.`` is dropped, TransformerEngine's norm names are Megatron's own, and the copy of a
    tied embedding on the last stage is left out (`tied_copy` finds it).
    """
    found: dict[str, Tensor] = {}
    for chunk in chunks:
        model = unwrapped(chunk)
        kept = ((name, value) for name, value in model.named_buffers() if name.endswith(_BUFFERS))
        for name, parameter in (*model.named_parameters(), *kept):
            whole = _global_name(name, model, arch, groups)
            if not (arch.tied and whole == HEAD.megatron):
                found[whole] = parameter
    return found


def tied_copy(chunks: Iterable[nn.Module], arch: Architecture) -> nn.Parameter | None:
    """The second table of a tied model whose first and last stage are on different ranks."""
    for chunk in chunks:
        copy = dict(unwrapped(chunk).named_parameters()).get(HEAD.megatron) if arch.tied else None
        if copy is not None:
            return copy
    return None


def unwrapped(chunk: nn.Module) -> nn.Module:
    """The model inside DDP or other wrappers, which all call it ``module``."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def _global_name(name: str, model: nn.Module, arch: Architecture, groups: ParallelGroups) -> str:
    for engine, plain in _ENGINE_NAMES.items():
        if name.endswith(engine):
            name = name.removesuffix(engine) + plain
    local_layer = _LAYER.search(name)
    if local_layer:
        layer: Any = model.get_submodule(f"decoder.layers.{local_layer.group()}")
        name = _LAYER.sub(str(layer.layer_number - 1), name, count=1)
    if arch.experts and _EXPERT.search(name):
        first = group_rank(groups.ep) * (arch.experts.count // group_size(groups.ep))
        name = _EXPERT.sub(lambda local: str(first + int(local.group())), name, count=1)
    return name


def padded_vocab_of(arch: Architecture, parameter: Tensor, groups: ParallelGroups) -> int:
    """Rows of the whole padded table, from one rank's shard."""
    rows = parameter.shape[0] * groups.tp_size
    if rows < arch.vocab:
        raise ConversionError(f"the model's table has {rows} rows; vocab_size = {arch.vocab} does not fit")
    return rows


def load_hf_weights(chunks: Sequence[nn.Module], folder: HfFolder, groups: ParallelGroups) -> None:
    """Fill every parameter of this rank's model chunks from an HF folder, one tensor at a time.

    Not collective: each rank reads what it holds.

    Raises:
        ConversionError: a tensor of the folder or a parameter of the model is missing, extra or of another
            shape.
    """
    folder.check_complete()
    arch = folder.architecture
    parameters = local_parameters(chunks, arch, groups)
    copy = tied_copy(chunks, arch)
    for row in all_rows(arch):
        parameter = parameters.pop(row.megatron, None)
        targets = [target for target in (parameter, copy if row == EMBEDDING else None) if target is not None]
        for target in targets:
            _fill(target, row, folder, groups)
    if parameters:
        raise ConversionError(
            f"{folder.path} has nothing for {len(parameters)} parameters, first {min(parameters)}"
        )


def is_table(row: Row) -> bool:
    """Whether the row is a vocabulary table, which Megatron pads."""
    return row.megatron in (EMBEDDING.megatron, HEAD.megatron)


def fuse(row: Row, folder: HfFolder, padded: int) -> Tensor:
    """One whole Megatron parameter from the HF tensors of a folder; ``padded`` rows if it is a table."""
    return row.layout.fuse([folder.tensor(name) for name in row.hf], sizes_of(folder.architecture, padded))


def split(row: Row, fused: Tensor, arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """The HF tensors in one whole Megatron parameter."""
    padded = fused.shape[0] if is_table(row) else 0
    return zip(row.hf, row.layout.split(fused, sizes_of(arch, padded)), strict=True)


def _fill(target: Tensor, row: Row, folder: HfFolder, groups: ParallelGroups) -> None:
    padded = padded_vocab_of(folder.architecture, target, groups) if is_table(row) else 0
    fused = fuse(row, folder, padded)
    if row.tp_dim is not None and not _is_expert(row):
        fused = shard(fused, row.tp_dim, groups.tp_size, groups.tp_rank, row.layout.blocks)
    if fused.shape != target.shape:
        raise ConversionError(
            f"{row.megatron} is {list(target.shape)}; {', '.join(row.hf)} of {folder.path} give "
            f"{list(fused.shape)}"
        )
    with torch.no_grad():
        target.copy_(fused)


def _is_expert(row: Row) -> bool:
    return "local_experts" in row.megatron  # whole on its rank: experts are never cut by tensor parallelism


@dataclass(frozen=True)
class _Holder:
    """Which pipeline and expert rank holds a parameter, and what its shard looks like."""

    pp_rank: int
    ep_rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def export_hf(
    chunks: Sequence[nn.Module], arch: Architecture, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of the model, whole, in layer order, the same on every rank.

    Collective over tp, pp and ep: every rank must consume it to the end. Memory: one fused tensor at a time.
    A tied head is not sent twice (TRAPS H25). Chunks may be wrapped in DDP or not.

    Raises:
        ConversionError: the model lacks a parameter or has one that no HF tensor stands for (TRAPS H27).
    """
    parameters = local_parameters(chunks, arch, groups)
    holders = _find_holders(parameters, groups)
    rows = list(all_rows(arch))
    odd = sorted(holders.keys() ^ {row.megatron for row in rows})
    if odd:
        raise ConversionError(
            f"model and table of {arch.family} disagree about {len(odd)} parameters, first {odd[0]}"
        )
    for row in rows:
        holder = holders[row.megatron]
        fused = _gather(parameters.get(row.megatron), row, holder, groups)
        for name, tensor in split(row, fused, arch):
            yield name, tensor.to(dtype_of(name, tensor.dtype)).contiguous()


def _find_holders(parameters: Mapping[str, Tensor], groups: ParallelGroups) -> dict[str, _Holder]:
    mine = {
        name: _Holder(groups.pp_rank, group_rank(groups.ep), tuple(parameter.shape), parameter.dtype)
        for name, parameter in parameters.items()
    }
    for group in (groups.ep, groups.pp):
        if group is not None:
            gathered: list[dict[str, _Holder]] = [{}] * group_size(group)
            dist.all_gather_object(gathered, mine, group=group)
            mine = {name: holder for part in reversed(gathered) for name, holder in part.items()}
    return mine


def _gather(parameter: Tensor | None, row: Row, holder: _Holder, groups: ParallelGroups) -> Tensor:
    """The whole fused tensor on every rank: over tp where it lies, then over ep and pp from its holder."""
    cut = row.tp_dim is not None and not _is_expert(row)
    full: Tensor | None = None
    if parameter is not None:
        full = parameter.detach()
        if cut and groups.tp is not None and row.tp_dim is not None:
            parts = [torch.empty_like(full) for _ in range(groups.tp_size)]
            dist.all_gather(parts, full.contiguous(), group=groups.tp)
            full = unshard(parts, row.tp_dim, row.layout.blocks)
    if _is_expert(row) and groups.pp_rank == holder.pp_rank:
        full = _broadcast(full, holder.shape, holder.dtype, groups.ep, holder.ep_rank)
    shape = list(holder.shape)
    if cut and row.tp_dim is not None:
        shape[row.tp_dim] *= groups.tp_size
    full = _broadcast(full, shape, holder.dtype, groups.pp, holder.pp_rank)
    assert full is not None, row.megatron  # a rank without it is in a group with its holder
    return full


def _broadcast(
    full: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    source: int,
) -> Tensor | None:
    """Send ``full`` from rank ``source`` of ``group``."""
    if group is None:
        return full
    if full is None:
        full = torch.empty(tuple(shape), dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
    full = full.contiguous()
    dist.broadcast(full, dist.get_global_rank(group, source), group=group)
    return full
