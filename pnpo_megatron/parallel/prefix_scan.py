"""Prefix sums and minima of every packed sequence across context-parallel shards: one small all-gather each.

A sequence split over C ranks lies in 2C chunks (`cp_layout`). Each rank scans its own two, the ranks exchange
one number a chunk, and every slot adds what came before its chunk. Positions and lengths need no exchange:
every rank knows the whole masks. Sums are int64 counts of `GRID_NATS`, so they are the same for every split
and packing; wrap-around cannot spoil a difference of two running counts, only a sum beyond 2^27 nats.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pnpo_megatron.algorithm.fixed_point import GRID_NATS
from pnpo_megatron.algorithm.ratios import RatioStats, check_same_shape, log_ratios
from pnpo_megatron.parallel.chunk_exchange import (
    count_special,
    earlier_minima,
    earlier_sums,
    from_sortable,
    special_sum,
    to_sortable,
)

# A single log-ratio of a million nats is as good as infinite, and keeps 128 of its kind below 2^27 nats.
_LARGEST_NATS = 2.0**20


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
        Bitwise the same numbers for every C, packing and order of samples. Communication: one all-gather of
        2*S int64 values a rank; if `preceding_min` or `suffix_sums` is asked for, collectively, another each.
    """
    check_same_shape(policy_logprobs=policy_logprobs, position=position, length=length)
    token = log_ratios(policy_logprobs, old_logprobs, response_mask)
    prefix_sum, total = prefix_scan(token, chunk_lengths, cp_group)

    def everywhere(per_response: Tensor) -> Tensor:
        return per_response.repeat_interleave(2 * chunk_lengths, output_size=token.numel())

    def suffix_sums(values: Tensor) -> tuple[Tensor, Tensor]:
        suffix, whole = suffix_scan(values, chunk_lengths, cp_group)
        return suffix, everywhere(whole)

    return RatioStats(
        token=token,
        prefix_sum=prefix_sum,
        response_sum=everywhere(total),
        position=position,
        length=length,
        compute_preceding_min=lambda: preceding_min(token, response_mask, chunk_lengths, cp_group),
        suffix_sums=suffix_sums,
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
    ends = chunk_lengths.repeat_interleave(2).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = None
    if not _all_plain(values):
        counts = count_special(values, values.abs() < _LARGEST_NATS)
        values = values.masked_fill(counts != 0, 0.0)
    ticks = (values * (1.0 / GRID_NATS)).round_().to(torch.int64)

    before, sums = _chunk_sums(ticks, ends)
    counted_before, counted = (None, None) if counts is None else _chunk_sums(counts, ends)
    offset, counted_offset, total = earlier_sums(sums, counted, cp_group)

    prefix = _scan_onto(ticks, starts, offset - before).to(torch.float64).mul_(GRID_NATS)
    if counted_offset is None:
        return prefix, total
    if counts is None or counted_before is None:
        counts, counted_before = torch.zeros_like(ticks), torch.zeros_like(before)
    return prefix.add_(special_sum(_scan_onto(counts, starts, counted_offset - counted_before))), total


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
    lengths, size = chunk_lengths.repeat_interleave(2), values.numel()
    ends = lengths.cumsum(0)
    # Later chunks get smaller keys, so one running minimum over all slots never looks into an earlier chunk.
    chunk = torch.arange(len(lengths), device=values.device)
    floor = ((len(lengths) - chunk) << 32).repeat_interleave(lengths, output_size=size)
    keys = to_sortable(values.masked_fill(~mask, torch.inf)).to(torch.int64) + floor
    inclusive = (keys.cummin(0).values - floor).to(torch.int32)
    earlier = earlier_minima(inclusive[ends - 1], cp_group)

    exclusive = torch.empty_like(inclusive)
    exclusive[1:] = inclusive[:-1]
    exclusive[ends - lengths] = to_sortable(values.new_full((), torch.inf))
    exclusive = torch.minimum(exclusive, earlier.repeat_interleave(lengths, output_size=size))
    result = from_sortable(exclusive)
    return result.masked_fill_(result == torch.inf, 0.0)


def _all_plain(values: Tensor) -> bool:
    """No NaN, infinity or huge value; only said where looking costs no device synchronisation."""
    if values.device.type != "cpu":
        return False
    low, high = values.aminmax()  # NaN if any is
    return bool((low > -_LARGEST_NATS) & (high < _LARGEST_NATS))


def _chunk_sums(values: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """[2S] sum of all local slots before each chunk, and [2S] sum of each chunk."""
    at_end = values.cumsum(0)[ends - 1]
    before = torch.cat([at_end.new_zeros(1), at_end[:-1]])
    return before, at_end - before


def _scan_onto(values: Tensor, starts: Tensor, shift: Tensor) -> Tensor:
    """Running sum over all slots, in place, plus the [2S] shift of each slot's chunk."""
    values[starts] += shift.diff(prepend=shift.new_zeros(1))
    return values.cumsum_(0)
