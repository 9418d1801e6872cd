"""Sums and maxima of metrics over a named group."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup | None) -> Tensor:
    total = values.detach().clone()
    if group is not None:
        dist.all_reduce(total, op=op, group=group)
    return total


def sum_over(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Elementwise sum of `values` over the ranks of `group`, on every rank; no gradient.

    The caller names the group whose ranks hold *different* parts of the total: `dp_cp` for token sums, `dp`
    for what every context-parallel rank already holds whole. Give float64 or integers where the order of
    ranks may not show.
    """
    return _all_reduce(values, dist.ReduceOp.SUM, group)


def max_over(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Elementwise maximum of `values` over the ranks of `group`, on every rank; no gradient."""
    return _all_reduce(values, dist.ReduceOp.MAX, group)
