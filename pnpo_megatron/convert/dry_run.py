"""What a conversion will do, said from headers alone: family, shapes, bytes and time."""

import re
import shutil
from pathlib import Path

import torch

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.families import hf_shapes
from pnpo_megatron.errors import ConversionError

BYTES_PER_SECOND = 150e6
"""Read, lay out, write and fsync, on a slow disk; docs/conversion.md has what was measured."""


def model_bytes(arch: Architecture, dtype: torch.dtype) -> int:
    """Bytes of all tensors in ``dtype``."""
    return sum(torch.Size(shape).numel() for shape in hf_shapes(arch).values()) * dtype.itemsize


def describe(arch: Architecture, dtype: torch.dtype, out: Path) -> str:
    """The plan of writing tensors of `dtype` to `out`, for people."""
    shapes = hf_shapes(arch)
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, shape in shapes.items():
        kind = re.sub(r"\.\d+\.", ".*.", name), shape
        kinds[kind] = kinds.get(kind, 0) + 1
    total = model_bytes(arch, dtype)
    largest = max(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    experts = f", {arch.experts.count} experts of {arch.experts.ffn}" if arch.experts else ""
    lines = [
        f"family      {arch.family}: {arch.layers} layers, hidden {arch.hidden}, {arch.heads} query and "
        f"{arch.kv_heads} key-value heads of {arch.head_dim}{experts}, vocabulary {arch.vocab}, "
        f"{'tied' if arch.tied else 'untied'}, rope {arch.rope.kind} with theta {arch.rope.theta:g}",
        f"tensors     {len(shapes)}, {total // dtype.itemsize:,} parameters",
        *(f"{count:>10}  {name} {list(shape)}" for (name, shape), count in kinds.items()),
        f"bytes       {total / 2**20:,.1f} MiB as {str(dtype).removeprefix('torch.')}, largest tensor "
        f"{largest / 2**20:,.1f} MiB",
        f"time        about {max(1.0, total / BYTES_PER_SECOND):,.0f} s of reading and writing at "
        f"{BYTES_PER_SECOND / 1e6:.0f} MB/s",
        f"target      {out}",
    ]
    return "\n".join(lines)


def check_space(arch: Architecture, dtype: torch.dtype, out: Path) -> None:
    """Refuse a target whose disk cannot hold the model.

    Raises:
        ConversionError: naming both sizes.
    """
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free, needed = shutil.disk_usage(there).free, model_bytes(arch, dtype)
    if free < needed:
        raise ConversionError(
            f"{out}: {needed / 2**30:,.1f} GiB are to be written and {free / 2**30:,.1f} GiB are free there; "
            "make room, or give --out on another disk"
        )
