"""Prefix sums and minima of every packed sequence across context-parallel shards: one small all-gather each.

A sequence split over C ranks lies in 2C chunks (`cp_layout`). Each rank scans its own two, the ranks exchange one
number a chunk, and every slot adds what came before its chunk. Positions and lengths need no exchange: every rank
knows the whole masks. Sums are int64 counts of `GRID_NATS`, so they are the same for every split and packing;
wrap-around cannot spoil a difference of two running counts, only a sum beyond 2^27 nats.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pnpo_megatron.algorithm.fixed_point import GRID_NATS
from pnpo_megatron.algorithm.ratios import RatioStats, check_same_shape, log_ratios
from pnpo_megatron.parallel.groups import group_rank, group_size

# A single log-ratio of a million nats is as good as infinite, and keeps 128 of its kind below 2^27 nats.
_LARGEST_NATS = 2.0**20
_INT64 = torch.iinfo(torch.int64)
_NAN_SUM, _LOW_SUM, _HIGH_SUM = _INT64.min, _INT64.min + 1, _INT64.max
_COUNT_BITS = 21


@torch.no_grad()
def ratio_stats(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    position: Tensor,
    length: Tensor,
    chunk_lengths: Tensor,
    cp_group: ProcessGroup | None,
) -> RatioStats:
    """Log-ratio statistics of a packed micro-batch, complete across context-parallel ranks.

    Args:
        policy_logprobs, old_logprobs: [T] float32, nats, local to this rank, label-aligned.
        response_mask: [T] bool.
        position, length: [T] int, t and L of the whole response; 1 off the mask.
        chunk_lengths: [S] int64, tokens of one zigzag chunk; the same on every rank.
        cp_group: the ranks that share these sequences, or None.
    Returns:
        Bitwise the same numbers for every C, packing and order of samples. Communication: one all-gather of 2*S
        int64 values a rank, and of 2*S int32 values if `preceding_min` is asked for, which is collective then.
    """
    check_same_shape(policy_logprobs=policy_logprobs, position=position, length=length)
    token = log_ratios(policy_logprobs, old_logprobs, response_mask)
    prefix_sum, total = prefix_scan(token, chunk_lengths, cp_group)
    return RatioStats(
        token=token,
        prefix_sum=prefix_sum,
        response_sum=total.repeat_interleave(2 * chunk_lengths, output_size=token.numel()),
        position=position,
        length=length,
        compute_preceding_min=lambda: preceding_min(token, response_mask, chunk_lengths, cp_group),
    )


@torch.no_grad()
def prefix_scan(
    values: Tensor, chunk_lengths: Tensor, cp_group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Inclusive prefix sum of every packed sequence under the zigzag layout, in multiples of `GRID_NATS`.

    Args:
        values: [T] float, local: for each sequence chunk r, then chunk 2C-1-r. A NaN spoils the sums from its
            own position on, in its own sequence; so does an infinity, or anything beyond 2^20.
        chunk_lengths: [S] int64, at least 1 each, equal on every rank.
        cp_group: context-parallel ranks, or None for C = 1.
    Returns:
        (prefix [T], total [S]), float64, bitwise the same for every C. Communication: one all-gather of 2*S
        int64 values a rank. Collective: every rank of cp_group must call it. No gradient flows through it.
    """
    lengths = chunk_lengths.repeat_interleave(2)
    ends = lengths.cumsum(0)
    special = ~(values.abs() < _LARGEST_NATS)
    # Where the answer costs no device synchronisation, the usual case skips the special values' own scan.
    is_plain = values.device.type == "cpu" and not bool(special.any())
    ticks = (values if is_plain else values.masked_fill(special, 0.0)) * (1.0 / GRID_NATS)
    running = ticks.round_().to(torch.int64).cumsum_(0)
    before, sums = _per_chunk(running, ends)

    codes = None if is_plain else _special_codes(values, special).cumsum_(0)
    if codes is not None:
        codes_before, code_sums = _per_chunk(codes, ends)
        sums = _with_sentinels(sums, _special_value(code_sums))
    offset, total, special_offset = _exchange_sums(sums, cp_group)

    size = values.numel()
    running += (offset - before).repeat_interleave(lengths, output_size=size)
    prefix = running.to(torch.float64).mul_(GRID_NATS)
    if codes is not None:
        codes -= codes_before.repeat_interleave(lengths, output_size=size)
        prefix += _special_value(codes)
    if values.device.type != "cpu" or bool((special_offset != 0).any()):
        prefix += special_offset.repeat_interleave(lengths, output_size=size)
    return prefix, total


@torch.no_grad()
def suffix_scan(
    values: Tensor, chunk_lengths: Tensor, cp_group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Inclusive suffix sum, over k >= t; otherwise as `prefix_scan`.

    Read backwards, a zigzag layout is a zigzag layout: rank r still holds chunks r and 2C-1-r.
    """
    suffix, total = prefix_scan(values.flip(0), chunk_lengths.flip(0), cp_group)
    return suffix.flip(0), total.flip(0)


@torch.no_grad()
def preceding_min(
    values: Tensor, mask: Tensor, chunk_lengths: Tensor, cp_group: ProcessGroup | None
) -> Tensor:
    """Minimum over the masked slots before each slot of its sequence; 0 where there is none.

    Args:
        values: [T] float32, local, zigzag order; a NaN on the mask spoils what follows it in its sequence.
        mask: [T] bool.
        chunk_lengths, cp_group: as for `prefix_scan`.
    Returns:
        [T] float32. Communication: one all-gather of 2*S int32 values a rank. Collective.
    """
    if values.dtype != torch.float32:
        raise ValueError(f"values are {values.dtype}; the prefix minimum compares float32 bit patterns")
    lengths = chunk_lengths.repeat_interleave(2)
    ends = lengths.cumsum(0)
    size = values.numel()
    # Later chunks get smaller keys, so one running minimum over all slots never looks into an earlier chunk.
    chunk = torch.arange(len(lengths), device=values.device)
    floor = ((len(lengths) - chunk) << 32).repeat_interleave(lengths, output_size=size)
    keys = _sortable(values.masked_fill(~mask, torch.inf)).to(torch.int64) + floor
    inclusive = (keys.cummin(0).values - floor).to(torch.int32)
    earlier = _exchange_minima(inclusive[ends - 1], cp_group)

    exclusive = torch.empty_like(inclusive)
    exclusive[1:] = inclusive[:-1]
    exclusive[ends - lengths] = _sortable(values.new_full((), torch.inf))
    exclusive = torch.minimum(exclusive, earlier.repeat_interleave(lengths, output_size=size))
    result = _unsortable(exclusive)
    return result.masked_fill_(result == torch.inf, 0.0)


def _per_chunk(running: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """From running sums over all local slots: [2S] sum before each chunk, and [2S] sum of each chunk."""
    at_end = running[ends - 1]
    before = torch.cat([at_end.new_zeros(1), at_end[:-1]])
    return before, at_end - before


def _exchange_sums(sums: Tensor, cp_group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """[2S] own chunk sums -> ([2S] int64 sum before each own chunk, [S] float64 total, [2S] NaN or inf before)."""
    chunks = _in_chunk_order(sums, cp_group)
    nan, high, low = chunks == _NAN_SUM, chunks == _HIGH_SUM, chunks == _LOW_SUM
    special = torch.zeros_like(chunks, dtype=torch.float64)
    special.masked_fill_(nan, torch.nan).masked_fill_(high, torch.inf).masked_fill_(low, -torch.inf)
    ticks = chunks.masked_fill(nan | high | low, 0)
    total = ticks.sum(0).to(torch.float64) * GRID_NATS + special.sum(0)
    return _own(_exclusive_sum(ticks), cp_group), total, _own(_exclusive_sum(special), cp_group)


def _exchange_minima(minima: Tensor, cp_group: ProcessGroup | None) -> Tensor:
    """[2S] own chunk minima -> [2S] minimum over all chunks before each own chunk."""
    chunks = _in_chunk_order(minima, cp_group)
    first = torch.full_like(chunks[:1], int(_sortable(torch.tensor(torch.inf))))
    return _own(torch.cat([first, chunks[:-1].cummin(0).values]), cp_group)


def _in_chunk_order(own: Tensor, cp_group: ProcessGroup | None) -> Tensor:
    """[2S], sequence by sequence the values of this rank's two chunks -> [2C, S], all ranks', in token order."""
    size = group_size(cp_group)
    gathered = own
    if cp_group is not None:
        gathered = own.new_empty(size * own.numel())
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=cp_group)
    by_rank = gathered.view(size, -1, 2)
    return torch.cat([by_rank[:, :, 0], by_rank[:, :, 1].flip(0)])


def _own(chunks: Tensor, cp_group: ProcessGroup | None) -> Tensor:
    """The rows of a [2C, S] table that belong to this rank, as [2S] in local order."""
    rank, size = group_rank(cp_group), group_size(cp_group)
    return torch.stack([chunks[rank], chunks[2 * size - 1 - rank]], dim=1).flatten()


def _exclusive_sum(chunks: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(chunks[:1]), chunks[:-1].cumsum(0)])


def _special_codes(values: Tensor, special: Tensor) -> Tensor:
    """[T] int64 with NaN, high and low values counted in three separate bit fields, so that counts add up."""
    high, low = special & (values > 0), special & (values < 0)
    return values.isnan().to(torch.int64) + (high.to(torch.int64) << _COUNT_BITS) + (
        low.to(torch.int64) << 2 * _COUNT_BITS
    )


def _special_value(codes: Tensor) -> Tensor:
    """What the counted values sum to: 0, NaN, or an infinity; both infinities together are NaN."""
    field = (1 << _COUNT_BITS) - 1
    nan, high, low = codes & field, (codes >> _COUNT_BITS) & field, (codes >> 2 * _COUNT_BITS) & field
    value = torch.zeros_like(codes, dtype=torch.float64).masked_fill_(high != 0, torch.inf)
    value.masked_fill_(low != 0, -torch.inf)
    return value.masked_fill_((nan != 0) | ((high != 0) & (low != 0)), torch.nan)


def _with_sentinels(sums: Tensor, special: Tensor) -> Tensor:
    sums = sums.masked_fill(special.isnan(), _NAN_SUM)
    return sums.masked_fill_(special == torch.inf, _HIGH_SUM).masked_fill_(special == -torch.inf, _LOW_SUM)


def _sortable(values: Tensor) -> Tensor:
    """float32 -> int32 in the same order; NaN becomes the smallest of all."""
    bits = values.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.masked_fill_(values.isnan(), torch.iinfo(torch.int32).min)


def _unsortable(ordered: Tensor) -> Tensor:
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    values = bits.view(torch.float32)
    return values.masked_fill(ordered == torch.iinfo(torch.int32).min, torch.nan)
