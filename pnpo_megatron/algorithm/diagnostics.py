"""What the gate and the weights did: sums and maxima that add up over micro-batches and ranks.

A tally never leaves the device. Sums are added, maxima are maximised, over micro-batches first and then over
the ranks that hold different tokens; one read at the end gives the metrics of the update.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pnpo_megatron.algorithm.objective import Mean, TokenTerms, renormalising_factor
from pnpo_megatron.algorithm.ratios import RatioStats
from pnpo_megatron.algorithm.weights import WEIGHTS

BINS = 10
"""Tenths of the response, by min(9, floor(10 (t-1) / L))."""
RUNGS = ("prefix", "sequence", "cumulative", "minpro")
"""Weights that are looked at beside the objective's own; the token ratio is `log_ratio`."""
SUMS = (
    "loss", "responses", "kept_responses", "valid", "finite", "low", "high", "with_advantage", "moving",
    "weight", "kept_weight", "kept_weight_squared", "log_ratio", "log_ratio_squared", "entropy",
    *(f"{rung}_squared" for rung in RUNGS),
)  # fmt: skip
BIN_SUMS = ("valid", "low", "high", "log_weight", "log_weight_squared")
MAXIMA = ("weight", "minus_weight")


@dataclass(frozen=True)
class Tally:
    """What some tokens add to the metrics."""

    sums: Tensor
    """[len(SUMS) + len(BIN_SUMS)*BINS] float64: `SUMS`, then each of `BIN_SUMS` for all bins."""
    maxima: Tensor
    """[len(MAXIMA)] float64; -inf where there is no token."""


@torch.no_grad()
def tally(
    loss: Tensor, stats: RatioStats, terms: TokenTerms, *, mask: Tensor, advantages: Tensor, entropy: Tensor
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
    kept = finite & terms.keep
    weight, log_ratio, log_weight = (
        _select(values, finite) for values in (terms.weight, stats.token, terms.log_weight)
    )
    low, high, with_advantage = mask & terms.below, mask & terms.above, mask & (advantages != 0)
    accepted = stats.length if terms.accepted is None else terms.accepted
    kept_weight = _select(weight, kept)
    rungs = [_select(WEIGHTS[rung](stats), finite).square() for rung in RUNGS]
    columns = (
        _select(1.0 / stats.length, mask), _select(1.0 / accepted, mask & terms.keep), mask, finite, low,
        high, with_advantage, with_advantage & terms.keep, weight, kept_weight, kept_weight.square(),
        log_ratio, log_ratio.square(), _select(entropy, mask) if entropy.shape == mask.shape else entropy,
        *rungs,
    )  # fmt: skip
    totals = [loss.detach().to(torch.float64), *(column.sum(dtype=torch.float64) for column in columns)]
    by_bin = _by_bin(stats, mask, low, high, log_weight, log_weight.square())
    return Tally(
        sums=torch.cat([torch.stack(totals), by_bin]),
        maxima=torch.stack([_largest(terms.weight, finite), _largest(-terms.weight, finite)]),
    )


def add_tallies(tallies: Iterable[Tally], device: torch.device | None = None) -> Tally:
    """The tally of all tokens together; of no token at all, if there is none."""
    sums = torch.zeros(len(SUMS) + len(BIN_SUMS) * BINS, dtype=torch.float64, device=device)
    maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device)
    for one in tallies:
        sums, maxima = sums + one.sums, torch.maximum(maxima, one.maxima)
    return Tally(sums, maxima)


def renormalised(total: Tally, mean: Mean) -> tuple[float, Tally]:
    """The factor for the gradient of a whole mini-batch, and the tally with its loss multiplied by it."""
    sums = dict(zip(SUMS, total.sums.tolist(), strict=False))
    factor = renormalising_factor(
        mean,
        tokens=sums["valid"],
        kept=sums["valid"] - sums["low"] - sums["high"],
        responses=round(sums["responses"]),
        kept_responses=round(sums["kept_responses"]),
    )
    scaled = total.sums.clone()
    scaled[SUMS.index("loss")] *= factor
    return factor, Tally(scaled, total.maxima)


def summarise(total: Tally) -> dict[str, float]:
    """Flat `area/name` metrics of an update, from the tally of its whole mini-batch; reads the device, once.

    `ladder/NAME` is the root mean square of the log-weight that each rung would have given;
    `weight/effective_fraction` is the effective sample size of the kept weights over the valid tokens.

    Fractions are of valid tokens. Means and extremes of weights and log-ratios leave out what is not finite
    (an overflowed weight counts as rejected high, a NaN makes the loss NaN); `tokens/not_finite` counts it.
    With no token a mean is 0.
    """
    values = total.sums.tolist()
    sums = dict(zip(SUMS, values[: len(SUMS)], strict=True))
    maxima = zip(MAXIMA, total.maxima.tolist(), strict=True)
    largest = {name: value if value > -math.inf else 0.0 for name, value in maxima}
    valid, finite = max(sums["valid"], 1.0), max(sums["finite"], 1.0)
    mean_log_ratio = sums["log_ratio"] / finite
    variance = sums["log_ratio_squared"] / finite - mean_log_ratio**2
    return {
        "loss": sums["loss"],
        "entropy": sums["entropy"] / valid,
        "gate/rejected_fraction": (sums["low"] + sums["high"]) / valid,
        "gate/rejected_fraction_low": sums["low"] / valid,
        "gate/rejected_fraction_high": sums["high"] / valid,
        **_bin_metrics(values[len(SUMS) :]),
        "weight/mean": sums["weight"] / finite,
        "weight/min": 0.0 - largest["minus_weight"],
        "weight/max": largest["weight"],
        "weight/effective_fraction": sums["kept_weight"] ** 2 / (sums["kept_weight_squared"] or 1.0) / valid,
        **{f"ladder/{rung}": math.sqrt(sums[f"{rung}_squared"] / finite) for rung in RUNGS},
        "ladder/token": math.sqrt(sums["log_ratio_squared"] / finite),
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


def _by_bin(stats: RatioStats, *columns: Tensor) -> Tensor:
    """[columns x BINS] their sums in each tenth of the response."""
    bins = torch.div(BINS * (stats.position.to(torch.int64) - 1), stats.length, rounding_mode="floor")
    table = torch.stack([column.to(torch.float64).flatten() for column in columns])
    sums = torch.zeros(len(columns), BINS, dtype=torch.float64, device=table.device)
    return sums.index_add_(1, bins.clamp_(max=BINS - 1).flatten(), table).flatten()


def _bin_metrics(sums: Sequence[float]) -> dict[str, float]:
    """Rejected fraction, and mean and spread of the log-weight, of every tenth."""
    table = dict(zip(BIN_SUMS, (sums[at : at + BINS] for at in range(0, len(sums), BINS)), strict=True))
    metrics: dict[str, float] = {}
    for index in range(BINS):
        one = {name: values[index] for name, values in table.items()}
        valid = max(one["valid"], 1.0)
        mean = one["log_weight"] / valid
        metrics |= {
            f"gate/rejected_fraction_bin_{index}": (one["low"] + one["high"]) / valid,
            f"gate/rejected_fraction_low_bin_{index}": one["low"] / valid,
            f"weight/log_mean_bin_{index}": mean,
            f"weight/log_std_bin_{index}": math.sqrt(max(one["log_weight_squared"] / valid - mean**2, 0.0)),
        }
    return metrics
