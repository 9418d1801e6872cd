"""What the gate and the weights did: sums and maxima that add up over micro-batches and ranks.

A tally never leaves the device. Sums are added, maxima are maximised, over micro-batches first and then over
the ranks that hold different tokens; one read at the end gives the metrics of the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pnpo_megatron.algorithm.objective import TokenTerms
from pnpo_megatron.algorithm.ratios import RatioStats

BINS = 10
"""Tenths of the response, by min(9, floor(10 (t-1) / L))."""
SUMS = (
    "loss", "valid", "finite", "low", "high", "with_advantage", "moving", "weight", "log_ratio",
    "log_ratio_squared", "entropy",
)  # fmt: skip
MAXIMA = ("weight", "minus_weight")


@dataclass(frozen=True)
class Tally:
    """What some tokens add to the metrics."""

    sums: Tensor
    """[len(SUMS) + 2*BINS] float64: `SUMS`, then valid tokens and rejected tokens of each bin."""
    maxima: Tensor
    """[len(MAXIMA)] float64; -inf where there is no token."""


@torch.no_grad()
def tally(
    loss: Tensor,
    stats: RatioStats,
    terms: TokenTerms,
    *,
    mask: Tensor,
    advantages: Tensor,
    entropy: Tensor,
) -> Tally:
    """Sums over the trained tokens of one micro-batch on one rank.

    Args:
        loss: scalar sum of share-weighted terms, from `policy_loss`.
        stats, terms: [T] statistics and decisions about each token.
        mask: [T] bool, True on trained tokens; nothing elsewhere is looked at.
        advantages: [T].
        entropy: nats; of the trained tokens alone, or [T] with anything off the mask.
    """
    finite = mask & terms.weight.isfinite() & stats.token.isfinite()
    weight, log_ratio = _select(terms.weight, finite), _select(stats.token, finite)
    low, high, with_advantage = mask & terms.below, mask & terms.above, mask & (advantages != 0)
    moving = with_advantage & terms.keep
    columns = (
        mask, finite, low, high, with_advantage, moving, weight, log_ratio, log_ratio.square(),
        _select(entropy, mask) if entropy.shape == mask.shape else entropy,
    )  # fmt: skip
    totals = [loss.detach().to(torch.float64), *(column.sum(dtype=torch.float64) for column in columns)]
    return Tally(
        sums=torch.cat([torch.stack(totals), _by_bin(stats, mask), _by_bin(stats, low | high)]),
        maxima=torch.stack([_largest(terms.weight, finite), _largest(-terms.weight, finite)]),
    )


def add_tallies(tallies: Iterable[Tally], device: torch.device | None = None) -> Tally:
    """The tally of all tokens together; of no token at all, if there is none."""
    sums = torch.zeros(len(SUMS) + 2 * BINS, dtype=torch.float64, device=device)
    maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device)
    for one in tallies:
        sums, maxima = sums + one.sums, torch.maximum(maxima, one.maxima)
    return Tally(sums, maxima)


def summarise(total: Tally) -> dict[str, float]:
    """Flat `area/name` metrics of an update, from the tally of its whole mini-batch; reads the device, once.

    Fractions are of valid tokens. Means and extremes of weights and log-ratios leave out what is not finite
    (an overflowed weight counts as rejected high, a NaN makes the loss NaN); `tokens/not_finite` counts it.
    With no token a mean is 0.
    """
    values = total.sums.tolist()
    sums = dict(zip(SUMS, values[: len(SUMS)], strict=True))
    largest = {name: value if value > -math.inf else 0.0 for name, value in _named_maxima(total)}
    valid, finite = max(sums["valid"], 1.0), max(sums["finite"], 1.0)
    mean_log_ratio = sums["log_ratio"] / finite
    variance = sums["log_ratio_squared"] / finite - mean_log_ratio**2
    return {
        "loss": sums["loss"],
        "entropy": sums["entropy"] / valid,
        "gate/rejected_fraction": (sums["low"] + sums["high"]) / valid,
        "gate/rejected_fraction_low": sums["low"] / valid,
        "gate/rejected_fraction_high": sums["high"] / valid,
        **_bin_fractions(values[len(SUMS) :]),
        "weight/mean": sums["weight"] / finite,
        "weight/min": 0.0 - largest["minus_weight"],
        "weight/max": largest["weight"],
        "log_ratio/mean": mean_log_ratio,
        "log_ratio/std": math.sqrt(max(variance, 0.0)),
        "tokens/valid": sums["valid"],
        "tokens/not_finite": sums["valid"] - sums["finite"],
    }


def skip_reason(total: Tally) -> str:
    """Why no optimizer step may be taken on these tokens, or "" (DECISIONS: Denominators).

    Momentum and weight decay alone would move the weights. The gradient's own finiteness is the learner's.
    """
    sums = dict(zip(SUMS, total.sums.tolist(), strict=False))
    if not math.isfinite(sums["loss"]):
        return "loss is not finite"
    if sums["valid"] == 0:
        return "no valid token"
    if sums["with_advantage"] == 0:
        return "every advantage is 0"
    if sums["moving"] == 0:
        return "every token with an advantage is rejected"
    return ""


def _select(values: Tensor, chosen: Tensor) -> Tensor:
    """float64 values where chosen, 0 elsewhere."""
    return values.to(torch.float64).masked_fill(~chosen, 0.0)


def _largest(values: Tensor, chosen: Tensor) -> Tensor:
    return values.to(torch.float64).masked_fill(~chosen, -torch.inf).max()


def _by_bin(stats: RatioStats, chosen: Tensor) -> Tensor:
    """[BINS] chosen tokens in each tenth of their response."""
    bins = torch.div(BINS * (stats.position.to(torch.int64) - 1), stats.length, rounding_mode="floor")
    counts = torch.zeros(BINS, dtype=torch.float64, device=chosen.device)
    return counts.index_add_(0, bins.clamp_(max=BINS - 1).flatten(), chosen.to(torch.float64).flatten())


def _bin_fractions(counts: Sequence[float]) -> dict[str, float]:
    pairs = zip(counts[:BINS], counts[BINS:], strict=True)
    return {
        f"gate/rejected_fraction_bin_{index}": rejected / max(valid, 1.0)
        for index, (valid, rejected) in enumerate(pairs)
    }


def _named_maxima(total: Tally) -> Iterable[tuple[str, float]]:
    return zip(MAXIMA, total.maxima.tolist(), strict=True)
