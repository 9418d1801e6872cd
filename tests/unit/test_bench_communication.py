"""The byte counter of bench/communication.py, and the bytes it is quoted for."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pnpo_megatron.parallel.prefix_scan import ratio_stats

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from communication import SentBytes, counted  # noqa: E402

RESPONSES, LENGTH, RANKS = 32, 15_360, 2


def count_on_one_rank():
    group, held = dist.group.WORLD, RESPONSES * LENGTH // RANKS
    zeros = torch.zeros(held)
    ones = torch.ones(held, dtype=torch.int64)
    chunks = torch.full((RESPONSES,), LENGTH // (2 * RANKS))
    whole = torch.empty(RANKS * held)
    with SentBytes() as both:
        dist.all_reduce(torch.zeros(3, dtype=torch.float64))
        dist.all_gather([torch.empty(5), torch.empty(5)], torch.zeros(5))
    return {
        "by hand": (both.total, both.calls),
        "gather": counted(lambda: dist.all_gather_single(whole, zeros, group=group)),
        "objective": counted(lambda: ratio_stats(zeros, zeros, ones.bool(), ones, ones, chunks, group)),
    }


def test_bytes_of_the_objective_are_at_most_a_400th_of_gathering_log_probs(spawn):
    first, second = spawn(count_on_one_rank, RANKS)
    assert first == second
    assert first["by hand"] == (3 * 8 + 5 * 4, ["allreduce_", "allgather_"])  # of two ranks
    gathered, _ = first["gather"]
    assert gathered == 4 * RESPONSES * LENGTH // RANKS  # its half, to the other rank
    sent, calls = first["objective"]
    assert (sent, len(calls)) == (2 * RESPONSES * 8, 1)
    # Both go to C - 1 others; what is sent to each does not depend on C, what is gathered falls with it.
    assert all(400 * sent <= gathered * RANKS // ranks for ranks in (2, 4, 8))


def test_a_collective_the_counter_does_not_know_is_an_error(spawn):
    assert spawn(scatter_is_refused, 1) == [True]


def scatter_is_refused():
    with SentBytes(), pytest.raises(KeyError, match="scatter_"):
        dist.scatter(torch.zeros(1), [torch.zeros(1)], src=0)
    return True
