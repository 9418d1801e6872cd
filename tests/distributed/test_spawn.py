"""The spawn fixture itself: a test harness that hides failures proves nothing."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawned import RankFailed


def sum_of_ranks() -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()  # rank 0 waits for a peer that has given up


def die_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def sleep_for_ever() -> None:
    time.sleep(1000)


def test_results_come_back_in_rank_order(spawn: Any) -> None:
    assert spawn(sum_of_ranks, 3) == [(0, 3.0), (1, 3.0), (2, 3.0)]


@pytest.mark.parametrize(
    ("function", "message"),
    [(fail_on_rank_one, "the cause"), (die_on_rank_zero, "rank 0 of 2: the process died")],
)
def test_a_failing_rank_is_named_while_its_peers_wait(spawn: Any, function: Any, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=message):
        spawn(function, 2)
    assert time.monotonic() - start < 20


def test_the_time_limit_names_the_ranks_that_gave_no_result(spawn: Any) -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] gave no result"):
        spawn(sleep_for_ever, 2, timeout_s=2.0)
