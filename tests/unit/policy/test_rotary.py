"""Rotary positions of a pack against Megatron's own function, sequence by sequence."""

from __future__ import annotations

import pytest
import torch

from pnpo_megatron.parallel.cp_layout import inverse_index
from pnpo_megatron.policy.rotary import MEGATRONS, packed_rotary, positions


class Group:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def pack(size: int, width: int, turned: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(size)
    lengths = torch.tensor([4, 16, 8, 24, 8]) * size
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    t = torch.randn(int(lengths.sum()) // size, 3, width, generator=generator).to(dtype)
    freqs = torch.randn(int(lengths.max()), 1, 1, turned, generator=generator) * 3.0
    return t, cu_seqlens, freqs


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("turned", [16, 12])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_megatrons_bit_for_bit(size, rank, turned, latent, dtype, monkeypatch):
    t, cu_seqlens, freqs = pack(size, 16, turned, dtype)
    group = Group(size, rank)
    monkeypatch.setattr("pnpo_megatron.policy.rotary.group_size", lambda group: group.size())
    monkeypatch.setattr("pnpo_megatron.policy.rotary.group_rank", lambda group: group.rank())
    outcomes = []
    for function in (MEGATRONS, packed_rotary, packed_rotary):  # the last with the angles of the second
        x = t.clone().requires_grad_()
        out = function(x, cu_seqlens, freqs, multi_latent_attention=latent, mscale=1.25, cp_group=group)
        out.backward(torch.linspace(-1.0, 1.0, out.numel(), dtype=dtype).view_as(out))
        outcomes.append((out.detach(), x.grad))
    for value, gradient in outcomes[1:]:
        assert torch.equal(value, outcomes[0][0]) and torch.equal(gradient, outcomes[0][1])


def test_one_pack_follows_another_with_the_same_frequencies():
    t, first, freqs = pack(1, 16, 16)
    second = first.clone()
    second[1:-1] += 2  # as long, cut elsewhere
    for cu_seqlens in (first, second, first):
        wanted = MEGATRONS(t, cu_seqlens, freqs, cp_group=Group(1, 0))
        assert torch.equal(packed_rotary(t, cu_seqlens, freqs), wanted)
    other = packed_rotary(t.bfloat16(), first, freqs)
    assert torch.equal(other, MEGATRONS(t.bfloat16(), first, freqs, cp_group=Group(1, 0)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_positions_of_all_ranks_are_each_sequences_own_once(size):
    _, cu_seqlens, _ = pack(size, 16, 16)
    tokens = int(cu_seqlens[-1]) // size
    ranks = torch.cat([positions(cu_seqlens, tokens, size, rank) for rank in range(size)])
    wanted = torch.cat([torch.arange(int(length)) for length in cu_seqlens.diff()])
    order = torch.arange(len(wanted)) if size == 1 else inverse_index(cu_seqlens.diff() // (2 * size), size)
    assert torch.equal(ranks[order], wanted)
