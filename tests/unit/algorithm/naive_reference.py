"""The formulas of the papers, one token at a time in Python floats; shares nothing with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOG_RATIOS = [0.2, -0.1, 0.05, 0.01, -0.04]
"""The reference vector of TRAPS.md."""


def naive_log_weights(name: str, log_ratios: Sequence[float]) -> list[float]:
    """log w_t of one response."""
    total = math.fsum(log_ratios)
    weights = []
    for t in range(1, len(log_ratios) + 1):
        prefix = math.fsum(log_ratios[:t])
        weights.append(
            {
                "token": log_ratios[t - 1],
                "cumulative": prefix,
                "prefix": prefix / t,
                "sequence": total / len(log_ratios),
                "minpro": log_ratios[t - 1] + (min(log_ratios[: t - 1]) if t > 1 else 0.0),
            }[name]
        )
    return weights


def naive_pnpo_coefficients(log_ratios: Sequence[float], low: float, high: float) -> list[float]:
    """M_t * w_t / L of Eq. 7-9 and 11 for one response, with advantage 1."""
    length = len(log_ratios)
    coefficients = []
    for t, log_weight in enumerate(naive_log_weights("prefix", log_ratios), start=1):
        weight, h = math.exp(log_weight), math.sqrt(length / t)
        keep = 1 - low * h <= weight <= 1 + high * h
        coefficients.append(weight / length if keep else 0.0)
    return coefficients


def published_clip_loss(
    level: str, policy: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float,
    dual_clip: float | None = None,
) -> Tensor:  # fmt: skip
    """GRPO's token-level or GSPO's sequence-level min/clip loss as published, differentiated by autograd.

    [B, T] float64 and [B]; GRPO averages over tokens, GSPO over a response and then over responses.
    """
    log_ratio = torch.where(mask, policy - old, 0.0)
    lengths = mask.sum(-1, keepdim=True)
    if level == "sequence":
        ratio = (log_ratio.sum(-1, keepdim=True) / lengths).exp().expand_as(policy)
    else:
        ratio = log_ratio.exp()
    gain = advantages[:, None] * torch.ones_like(policy)
    objective = torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    if dual_clip is not None:
        objective = torch.where(gain < 0, torch.maximum(objective, dual_clip * gain), objective)
    objective = torch.where(mask, objective, 0.0)
    if level == "sequence":
        return -(objective.sum(-1) / lengths.squeeze(-1)).mean()
    return -objective.sum() / mask.sum()


def random_responses(
    rows: int, width: int, *, scale: float = 0.05, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Policy and old log-probs [rows, width] and a mask with left padding, holes and ragged ends."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3 - 0.05
    policy = old + scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) > 0.3
    mask[:, width // 2] = True
    return policy.to(dtype), old.to(dtype), mask
