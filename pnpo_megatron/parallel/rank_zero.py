"""Work that one rank does for all: sampling, grading, evaluating, writing."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class PeerError(RuntimeError):
    """Rank 0 failed while the others waited for it."""


def from_rank_zero(work: Callable[[], T], group: dist.ProcessGroup | None, doing: str) -> T:
    """Run `work` on rank 0 and return its value on every rank. Collective over `group`.

    Values cross by pickle between the ranks of this run. An error on rank 0 is raised there as it is, and on
    the others as PeerError, so that nobody waits for a rank that has given up.
    """
    if group is None:
        return work()
    box: list[Any] = [None, None]
    failure: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            box[0] = work()
        except Exception as error:
            failure = error
            box[1] = f"{type(error).__name__}: {error}"
    try:
        dist.broadcast_object_list(box, group_src=0, group=group)
    except RuntimeError as error:
        if failure is not None:
            raise failure from error
        raise PeerError(f"rank {dist.get_rank()} waited for rank 0 while {doing}: {error}") from error
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise PeerError(f"rank 0 failed while {doing}: {box[1]}")
    value: T = box[0]
    return value


def any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """True on every rank if it is True on any. Collective over `group`."""
    return any(gather_from_all(flag, group))


def gather_from_all(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's value, in rank order, on every rank. Collective over `group`."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
