"""What context-parallel ranks tell each other about their zigzag chunks, and its encoding.

One number a chunk goes round. NaN and infinity travel inside it: as three reserved values of a sum, and as
the smallest key of a minimum.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pnpo_megatron.algorithm.fixed_point import GRID_NATS
from pnpo_megatron.parallel.groups import group_rank, group_size

_INT64 = torch.iinfo(torch.int64)
_SMALLEST_KEY = torch.iinfo(torch.int32).min
_FIELD_BITS = 21
_ONE_NAN, _ONE_HIGH, _ONE_LOW = 1, 1 << _FIELD_BITS, 1 << 2 * _FIELD_BITS
_RESERVED = ((_INT64.min, _ONE_NAN), (_INT64.max, _ONE_HIGH), (_INT64.min + 1, _ONE_LOW))
"""(sum sent, what it counts as) of chunks that hold NaN, infinity, or minus infinity."""


def earlier_sums(
    sums: Tensor, special: Tensor | None, cp_group: ProcessGroup | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What lies before each own chunk of its sequence, and the totals. One all-gather of [2S] int64.

    Args:
        sums: [2S] int64, grid steps in this rank's chunks: sequence by sequence, chunk r then 2C-1-r.
        special: [2S] int64, counts of special values in them, from `count_special`; None for none.
    Returns:
        ([2S] int64 steps before, [2S] int64 special values before, [S] float64 total in nats). Without any
        special value on any rank the second is None, where seeing that costs no device synchronisation.
    """
    if special is not None:
        value = special_sum(special)
        for (sent, _), holds in zip(
            _RESERVED, (value.isnan(), value == torch.inf, value == -torch.inf), strict=True
        ):
            sums = sums.masked_fill(holds, sent)
    steps = _in_chunk_order(sums, cp_group)
    if _none_reserved(steps):
        running = steps.cumsum(0)
        return _own(running - steps, cp_group), None, running[-1].to(torch.float64) * GRID_NATS
    counts = torch.zeros_like(steps)
    for sent, count in _RESERVED:
        counts.masked_fill_(steps == sent, count)
    steps = steps.masked_fill(counts != 0, 0)
    total = steps.sum(0).to(torch.float64) * GRID_NATS + special_sum(counts.sum(0))
    return _own(steps.cumsum(0) - steps, cp_group), _own(counts.cumsum(0) - counts, cp_group), total


def _none_reserved(steps: Tensor) -> bool:
    if steps.device.type != "cpu":
        return False
    low, high = steps.aminmax()
    return int(low) > _INT64.min + 1 and int(high) < _INT64.max


def earlier_minima(minima: Tensor, cp_group: ProcessGroup | None) -> Tensor:
    """[2S] int32 keys of own chunk minima -> minimum over all chunks before each. One all-gather of them."""
    chunks = _in_chunk_order(minima, cp_group)
    none = torch.full_like(chunks[:1], int(to_sortable(torch.tensor(torch.inf))))
    return _own(torch.cat([none, chunks[:-1].cummin(0).values]), cp_group)


def _in_chunk_order(own: Tensor, cp_group: ProcessGroup | None) -> Tensor:
    """[2S], this rank's two chunks sequence by sequence -> [2C, S] of all ranks, in token order."""
    size = group_size(cp_group)
    by_rank = (own if cp_group is None else _from_all(own, cp_group)).view(size, -1, 2)
    return torch.cat([by_rank[:, :, 0], by_rank[:, :, 1].flip(0)])


def _from_all(own: Tensor, group: ProcessGroup) -> Tensor:
    """[C * n] of all ranks, from [n] of each."""
    size = group_size(group)
    gathered = own.new_empty(size * own.numel())
    if dist.get_backend(group) == "gloo":
        # Its all-gather hands parts round a ring, C - 1 waits in a row; here everybody sends to everybody.
        dist.all_to_all_single(gathered, own.repeat(size), group=group)
    else:
        dist.all_gather_single(gathered, own.contiguous(), group=group)
    return gathered


def _own(chunks: Tensor, cp_group: ProcessGroup | None) -> Tensor:
    """The rows of a [2C, S] table that belong to this rank, as [2S] in local order."""
    rank, size = group_rank(cp_group), group_size(cp_group)
    return torch.stack([chunks[rank], chunks[2 * size - 1 - rank]], dim=1).flatten()


def count_special(values: Tensor, plain: Tensor) -> Tensor:
    """int64 counts of what `plain` leaves out: NaN, high and low in separate bit fields, which add up."""
    nan, high, low = values.isnan(), ~plain & (values > 0), ~plain & (values < 0)
    return nan * _ONE_NAN + high * _ONE_HIGH + low * _ONE_LOW


def special_sum(counts: Tensor) -> Tensor:
    """float64 sum of the counted values: 0, NaN, or an infinity; both infinities together are NaN."""
    nan, high, low = ((counts >> shift) & (_ONE_HIGH - 1) for shift in (0, _FIELD_BITS, 2 * _FIELD_BITS))
    value = torch.zeros_like(counts, dtype=torch.float64)
    value.masked_fill_(high != 0, torch.inf).masked_fill_(low != 0, -torch.inf)
    return value.masked_fill_((nan != 0) | ((high != 0) & (low != 0)), torch.nan)


def to_sortable(values: Tensor) -> Tensor:
    """float32 -> int32 in the same order; NaN becomes the smallest of all."""
    bits = values.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill_(values.isnan(), _SMALLEST_KEY)


def from_sortable(keys: Tensor) -> Tensor:
    """The way back from `to_sortable`."""
    values = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)
    return values.masked_fill(keys == _SMALLEST_KEY, torch.nan)
