"""The KL estimate and the regulariser by hand."""

from __future__ import annotations

import math

import pytest
import torch

from pnpo_megatron.algorithm.regularise import k3, regulariser


def test_k3_has_the_mean_of_the_exact_kl() -> None:
    """Over all tokens of a vocabulary, weighted by the policy that draws them."""
    draw = torch.Generator().manual_seed(1)
    policy, reference = torch.randn(2, 50, generator=draw, dtype=torch.float64).log_softmax(-1)
    exact = float((policy.exp() * (policy - reference)).sum())
    assert float((policy.exp() * k3(policy, reference)).sum()) == pytest.approx(exact, rel=1e-12)
    assert bool((k3(policy, reference) >= 0).all()) and bool((k3(policy, policy) == 0).all())


def test_value_and_slopes_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -2.0], dtype=torch.float64)
    share = torch.tensor([0.25, 0.75], dtype=torch.float64)
    value = regulariser(logprobs, entropy, reference, share, kl_coef=2.0, entropy_coef=0.1)
    first = math.exp(-0.5) + 0.5 - 1.0
    assert float(value.detach()) == pytest.approx(0.25 * (2 * first - 0.05) + 0.75 * (0.0 - 0.15), rel=1e-12)
    by_logprobs, by_entropy = torch.autograd.grad(value, (logprobs, entropy))
    assert by_logprobs.tolist() == pytest.approx([0.25 * 2 * (1 - math.exp(-0.5)), 0.0], abs=1e-12)
    assert by_entropy.tolist() == pytest.approx([-0.1 * 0.25, -0.1 * 0.75], rel=1e-12)


def test_entropy_alone_needs_no_reference() -> None:
    one = torch.ones(1)
    assert float(regulariser(-one, one, None, one, kl_coef=0.0, entropy_coef=0.5)) == -0.5
