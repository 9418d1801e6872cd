"""The grouped product of experts against one product each, and what it holds for backward."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from pnpo_megatron.policy.experts import _product

COUNTS = (3, 0, 5, 1)


def parts() -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(COUNTS), 16, generator=draw, requires_grad=True)
    weights = [torch.randn(24, 16, generator=draw, requires_grad=True) for _ in COUNTS]
    return rows, weights, torch.tensor(COUNTS).cumsum(0).to(torch.int32)


def test_values_and_gradients_are_those_of_one_product_an_expert() -> None:
    rows, weights, ends = parts()
    single = torch.cat([one @ weight.T for one, weight in zip(rows.split(COUNTS), weights, strict=True)])
    grouped = _product(rows, weights, ends)
    torch.testing.assert_close(grouped, single, rtol=0, atol=0)
    upstream = torch.randn(grouped.shape, generator=torch.Generator().manual_seed(4))
    for ours, theirs in zip(
        torch.autograd.grad(grouped, (rows, *weights), upstream),
        torch.autograd.grad(single, (rows, *weights), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_no_copy_of_the_weights_waits_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    stack = torch.stack

    def noted(*args: Any) -> torch.Tensor:
        made.append(weakref.ref(result := stack(*args)))
        return result

    rows, weights, ends = parts()
    monkeypatch.setattr(torch, "stack", noted)
    grouped = _product(rows, weights, ends)
    assert [one() for one in made] == [None]
    grouped.square().sum().backward()
    assert len(made) == 2 and all(weight.grad is not None for weight in weights)
