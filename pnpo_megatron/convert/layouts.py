"""How HF tensors become Megatron's fused ones and back: pure functions of tensors.

Megatron fuses q, k and v by key-value group, [its q heads; k; v] for each group, and the gated MLP as
[gate; up]. Weights and biases follow the same rule: only dimension 0 is touched, except by `shard`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """The numbers the layouts need."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    padded_vocab: int


def fuse_qkv(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """q [heads*d, ...], k and v [kv_heads*d, ...] to [(heads + 2*kv_heads)*d, ...], by key-value group (TRAPS
    H23).

    With 4 query heads, 2 key-value heads and d = 1 the rows are q0 q1 k0 v0 q2 q3 k1 v1.
    """
    q, k, v = parts
    groups, rest = sizes.kv_heads, q.shape[1:]
    grouped = [part.reshape(groups, -1, *rest) for part in (q, k, v)]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def split_qkv(fused: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """The inverse of `fuse_qkv`."""
    rest, d = fused.shape[1:], sizes.head_dim
    widths = [sizes.heads // sizes.kv_heads * d, d, d]
    grouped = fused.reshape(sizes.kv_heads, sum(widths), *rest)
    return tuple(part.reshape(-1, *rest) for part in grouped.split(widths, dim=1))


def pad_vocab(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """[vocab, hidden] to [padded_vocab, hidden] with zero rows at the end (TRAPS H24)."""
    (table,) = parts
    if sizes.padded_vocab == sizes.vocab:
        return table
    padding = table.new_zeros(sizes.padded_vocab - sizes.vocab, *table.shape[1:])
    return torch.cat((table, padding))


def trim_vocab(fused: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """The inverse of `pad_vocab`; what the padding rows hold does not matter."""
    return (fused[: sizes.vocab],)


@dataclass(frozen=True)
class Layout:
    """A pair of inverse functions, and how tensor parallelism cuts the fused tensor."""

    fuse: Callable[[Sequence[Tensor], Sizes], Tensor]
    split: Callable[[Tensor, Sizes], tuple[Tensor, ...]]
    blocks: int = 1
    """Equal blocks along the cut dimension that are cut one by one: 2 for [gate; up]."""


SINGLE = Layout(lambda parts, _: parts[0], lambda fused, _: (fused,))
QKV = Layout(fuse_qkv, split_qkv)
GATE_UP = Layout(lambda parts, _: torch.cat(tuple(parts)), lambda fused, _: fused.chunk(2), blocks=2)
VOCAB = Layout(pad_vocab, trim_vocab)


def shard(tensor: Tensor, dim: int, size: int, rank: int, blocks: int = 1) -> Tensor:
    """The slice of a full tensor that tensor-parallel `rank` of `size` holds along `dim`."""
    pieces = [block.chunk(size, dim)[rank] for block in tensor.chunk(blocks, dim)]
    return pieces[0] if blocks == 1 else torch.cat(pieces, dim)


def unshard(shards: Sequence[Tensor], dim: int, blocks: int = 1) -> Tensor:
    """The inverse of `shard`, from the slices of all ranks in rank order."""
    if len(shards) == 1:
        return shards[0]
    cut = [piece.chunk(blocks, dim) for piece in shards]
    return torch.cat([piece[block] for block in range(blocks) for piece in cut], dim)
