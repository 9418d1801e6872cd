"""Causal core attention for packed sequences and context parallelism where TransformerEngine is absent.

Keys and values are gathered over the context-parallel ranks and every chunk of queries attends to its own
sequence up to itself. Sequences of similar length run in one call, padded at their ends: under a causal mask
no real query can see a padded key.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pnpo_megatron.errors import ConfigError
from pnpo_megatron.parallel.cp_layout import inverse_index
from pnpo_megatron.parallel.gather import gather_first_dim
from pnpo_megatron.parallel.groups import group_rank, group_size

# A call costs about as much as this many query-key pairs; padding may add that and 30 % of the real pairs.
_CALL_PAIRS = 256
_PADDING = 0.3
_LARGEST_MASK = 2**24


class SdpaCoreAttention(torch.nn.Module):
    """Megatron core attention (`ModuleSpec` core_attention) on torch's scaled_dot_product_attention."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ):
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ConfigError(
                f"attention_dropout = {dropout}: importance ratios need the same function twice; use 0"
            )
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise ConfigError(
                f"window_size = {config.window_size}, softmax_type = {config.softmax_type!r}: without "
                "TransformerEngine only plain causal attention is built"
            )
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group: ProcessGroup | None = None if config.context_parallel_size == 1 else pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend causally inside every sequence.

        Args:
            query: [T, heads, d], local to this rank, zigzag order.
            key, value: the same with KV groups for heads.
            attention_mask, attn_mask_type: not read, the mask is causal.
            packed_seq_params: its `cu_seqlens_q` are the padded lengths of the whole sequences.
        Returns:
            [T, heads * d].
        """
        if attention_bias is not None or packed_seq_params is None:
            raise ValueError("SdpaCoreAttention takes packed sequences, without attention_bias")
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        out = packed_causal_attention(query, key, value, lengths, self.softmax_scale, self.cp_group)
        return out.flatten(1)


def packed_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, cp_group: ProcessGroup | None
) -> Tensor:
    """Causal attention inside each of several sequences laid end to end and split in zigzag order.

    Args:
        query: [T, heads, d] of this rank.
        key, value: [T, groups, d] of this rank; groups divides heads.
        lengths: padded length of every whole sequence, a multiple of 2C where C > 1.
        cp_group: the ranks that share the sequences, or None.
    Returns:
        [T, heads, d]. Communication: one all-gather of keys and values forward, one reduce-scatter backward.
    """
    size, rank = group_size(cp_group), group_rank(cp_group)
    multiple = 1 if size == 1 else 2 * size
    if any(length % multiple for length in lengths) or sum(lengths) != query.shape[0] * size:
        raise ValueError(
            f"{query.shape[0]} tokens on each of {size} context-parallel ranks do not hold sequences of "
            f"padded lengths {lengths}; each has to be a multiple of {multiple}"
        )
    plan = _plan(tuple(lengths), size, rank, query.device)
    if cp_group is not None:
        key, value = gather_first_dim(torch.stack([key, value], dim=1), cp_group).unbind(1)
    outputs = [_attend(query, key, value, call, scale) for call in plan.calls]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if plan.restore is None else joined.index_select(0, plan.restore)


@dataclass(frozen=True)
class _Call:
    """Query chunks of similar size that share one call; the shorter ones are padded at their ends."""

    count: int
    queries: Tensor | None
    """[count * longest] slots of the local queries; None for all of them in order."""
    keys: Tensor | None
    """[count * longest] slots of the gathered keys; None for all of them in order."""
    mask: Tensor | None
    """[count or 1, 1, queries, keys] bool; None for the plain causal one."""


@dataclass(frozen=True)
class _Plan:
    calls: tuple[_Call, ...]
    restore: Tensor | None
    """[T] where each local slot lies in the joined outputs; None for in order."""


@dataclass(frozen=True)
class _Chunk:
    """Consecutive queries of one sequence on this rank."""

    slot: int
    """First local slot."""
    length: int
    offset: int
    """Position of the first query in its sequence."""
    begin: int
    """Where the sequence begins in natural order."""

    @property
    def keys(self) -> int:
        return self.offset + self.length


def _attend(query: Tensor, key: Tensor, value: Tensor, call: _Call, scale: float) -> Tensor:
    def rows(x: Tensor, index: Tensor | None) -> Tensor:
        x = x if index is None else x.index_select(0, index)
        return x.view(call.count, -1, *x.shape[1:]).transpose(1, 2)

    out = torch.nn.functional.scaled_dot_product_attention(
        rows(query, call.queries),
        rows(key, call.keys),
        rows(value, call.keys),
        attn_mask=call.mask,
        is_causal=call.mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=16)
def _plan(lengths: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device) -> _Plan:
    """Which chunks run together. One plan serves all layers and passes of a micro-batch."""
    if cp_size == 1 and len(set(lengths)) == 1:
        return _Plan((_Call(len(lengths), None, None, None),), None)
    whole = torch.tensor(lengths)
    natural = torch.arange(sum(lengths)) if cp_size == 1 else inverse_index(whole // (2 * cp_size), cp_size)
    groups = _groups(_chunks(lengths, cp_size, cp_rank))
    outputs, done = torch.empty(sum(lengths) // cp_size, dtype=torch.int64), 0
    for group in groups:
        longest = max(chunk.length for chunk in group)
        for chunk in group:
            outputs[chunk.slot : chunk.slot + chunk.length] = torch.arange(done, done + chunk.length)
            done += longest
    return _Plan(tuple(_call(group, natural, device) for group in groups), outputs.to(device))


def _call(chunks: list[_Chunk], natural: Tensor, device: torch.device) -> _Call:
    columns = torch.tensor([(c.slot, c.length, c.offset, c.begin) for c in chunks]).T
    slot, length, offset, begin = columns[..., None]
    row, column = torch.arange(int(length.max())), torch.arange(int((offset + length).max()))
    queries = slot + torch.minimum(row, length - 1)
    keys = natural[begin + torch.minimum(column, offset + length - 1)]
    mask = None
    if offset.any():
        if len(set(offset.flatten().tolist())) == 1:
            offset = offset[:1]
        mask = ((offset + row)[:, None, :, None] >= column).to(device)
    return _Call(len(chunks), queries.flatten().to(device), keys.flatten().to(device), mask)


def _chunks(lengths: tuple[int, ...], cp_size: int, cp_rank: int) -> list[_Chunk]:
    chunks, slot, begin = [], 0, 0
    for length in lengths:
        size = length // (2 * cp_size)
        places = [(cp_rank * size, size), ((2 * cp_size - 1 - cp_rank) * size, size)]
        for offset, width in [(0, length)] if cp_size == 1 else places:  # at C = 1 the two chunks are one
            chunks.append(_Chunk(slot, width, offset, begin))
            slot += width
        begin += length
    return chunks


def _groups(chunks: list[_Chunk]) -> list[list[_Chunk]]:
    """Chunks that are worth padding to a common size, largest first."""
    groups: list[list[_Chunk]] = []
    for chunk in sorted(chunks, key=lambda c: (c.length * c.keys, c.length), reverse=True):
        if groups and _worth_padding([*groups[-1], chunk]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _worth_padding(chunks: list[_Chunk]) -> bool:
    padded = len(chunks) * max(c.length for c in chunks) * max(c.keys for c in chunks)
    real = sum(c.length * c.keys for c in chunks)
    if any(c.offset for c in chunks) and padded > _LARGEST_MASK:
        return False
    return padded - real <= len(chunks) * _CALL_PAIRS + _PADDING * real
