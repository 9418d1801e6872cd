"""Exact quantiles of numbers that lie on several ranks, without bringing them together."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pnpo_megatron.parallel.chunk_exchange import from_sortable, to_sortable
from pnpo_megatron.parallel.reduce import sum_over

_OFFSET = 2**31


@torch.no_grad()
def quantiles(values: Tensor, levels: Sequence[float], group: ProcessGroup | None) -> Tensor:
    """For each level q the smallest value v with at least q of all values <= v; one of them, not a blend.

    Args:
        values: [n] float32, this rank's part, which may be empty.
        levels: in (0, 1].
        group: the ranks that hold the other parts.

    Returns:
        [len(levels)] float32, 0 where there is no value at all; the same for every split. Collective: five
        sums over the group, the largest of 255 int64 a level. The host waits for nothing.
    """
    keys = (to_sortable(values).to(torch.int64) + _OFFSET).sort().values
    count = sum_over(torch.tensor(keys.numel(), device=keys.device), group)
    share = torch.tensor(levels, dtype=torch.float64, device=keys.device)
    wanted = (share * count).ceil().to(torch.int64).clamp_(min=1)[:, None]
    found = torch.zeros_like(wanted)
    digits = torch.arange(1, 256, device=keys.device)
    for shift in (24, 16, 8, 0):  # the key's bytes, the highest first
        below = torch.searchsorted(keys, found + (digits << shift))  # how many keys have a smaller byte
        found += (sum_over(below, group) < wanted).sum(-1, keepdim=True) << shift
    result = from_sortable((found.squeeze(1) - _OFFSET).to(torch.int32))
    return torch.where(count > 0, result, 0.0)
