"""A rollout batch from rank 0 to all ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pnpo_megatron.loop import Metrics
from pnpo_megatron.parallel.rank_zero import from_rank_zero
from pnpo_megatron.types import RolloutBatch


def share_batch(
    take: Callable[[], tuple[RolloutBatch, Metrics]], group: dist.ProcessGroup | None, doing: str
) -> tuple[RolloutBatch, Metrics]:
    """`from_rank_zero`, with routes as one tensor: pickled, gigabytes would hold up every thread of a rank,
    those too that tell the others that it lives."""
    held: list[Tensor] = []

    def without_routes() -> tuple[RolloutBatch, Metrics, Any]:
        batch, metrics = take()
        routes = [one.routes for one in batch.sequences if one.routes is not None]
        if not routes:
            return batch, metrics, None
        held.append(torch.cat(routes))
        return batch.with_routes([None] * len(routes)), metrics, (held[0].shape, held[0].dtype)

    batch, metrics, form = from_rank_zero(without_routes, group, doing)
    if form is None:
        return batch, metrics
    whole = held[0] if held else torch.empty(form[0], dtype=form[1])
    if group is not None:
        dist.broadcast(whole, group_src=0, group=group)
    return batch.with_routes(whole.split([len(one.ids) for one in batch.sequences])), metrics
