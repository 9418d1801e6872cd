"""The zigzag layout: every token lies on exactly one rank, and comes back."""

from __future__ import annotations

import pytest
import torch

from pnpo_megatron.data.partition import Layout
from pnpo_megatron.parallel.cp_layout import inverse_index, local_index


def test_h19_eight_slots_on_two_ranks() -> None:
    chunks = torch.tensor([2])
    assert local_index(chunks, 2, 0).tolist() == [0, 1, 6, 7]
    assert local_index(chunks, 2, 1).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_h19_scatter_then_gather_returns_every_real_token(cp_size: int) -> None:
    for first in range(1, 18):
        lengths = [first, 5, 1, 40]
        padded = [Layout(max_tokens=64, context_size=cp_size).pad(length) for length in lengths]
        whole, number = torch.full((sum(padded),), -1), 0
        for begin, length in zip(torch.tensor([0, *padded]).cumsum(0), lengths, strict=False):
            whole[begin : begin + length] = torch.arange(number, number + length)
            number += length
        chunks = torch.tensor(padded) // (2 * cp_size)
        local = [whole[local_index(chunks, cp_size, rank)] for rank in range(cp_size)]
        assert sum(int((part >= 0).sum()) for part in local) == sum(lengths)
        assert torch.equal(torch.cat(local)[inverse_index(chunks, cp_size)], whole)


def test_one_rank_holds_the_natural_order() -> None:
    chunks = torch.tensor([3, 1, 20])
    assert torch.equal(local_index(chunks, 1, 0), torch.arange(48))
    assert torch.equal(inverse_index(chunks, 1), torch.arange(48))


@pytest.mark.parametrize("cp_size", [2, 4])
def test_every_rank_has_the_same_causal_work(cp_size: int) -> None:
    visible_keys = [int((local_index(torch.tensor([6]), cp_size, rank) + 1).sum()) for rank in range(cp_size)]
    assert len(set(visible_keys)) == 1
