"""Joining the shards of a tensor inside autograd."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from pnpo_megatron.parallel.groups import group_size


def gather_first_dim(local: Tensor, group: ProcessGroup | None) -> Tensor:
    """Join equal shards along the first dimension, in rank order; the backward pass sums and scatters.

    Args:
        local: [n, ...], of the same shape on every rank.
        group: the ranks that hold the shards, or None.
    Returns:
        [ranks * n, ...] on every rank. Communication: one all-gather forward, one reduce-scatter backward.
    """
    return local if group is None else _GatherFirstDim.apply(local, group)  # type: ignore[no-any-return, no-untyped-call]


class _GatherFirstDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        whole = local.new_empty(local.shape[0] * group_size(group), *local.shape[1:])
        dist.all_gather_single(whole, local.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        local = grad.new_empty(grad.shape[0] // group_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_single(local, grad.contiguous(), group=ctx.group)
        return local, None
