"""Metrics of one update: sums and extremes that add up over micro-batches and ranks, read once at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pnpo_megatron.algorithm.objective import TokenTerms
from pnpo_megatron.algorithm.ratios import RatioStats
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.parallel.reduce import max_over, sum_over
from pnpo_megatron.types import PackedBatch

BINS = 10
SUMS = (
    "loss", "tokens", "low", "high", "moving", "weight", "log_ratio", "log_ratio_squared", "entropy",
    "mismatch", "mismatch_abs", "mismatch_kl",
)  # fmt: skip
MAXIMA = ("weight", "minus_weight", "mismatch_abs")


@dataclass(frozen=True)
class Tally:
    """What a micro-batch adds: float64, on the device, nothing read back."""

    sums: Tensor
    """[len(SUMS) + 2 * BINS]: `SUMS`, then trained tokens and rejected tokens by position bin."""
    maxima: Tensor
    """[len(MAXIMA)]."""


@torch.no_grad()
def tally(loss: Tensor, entropy: Tensor, stats: RatioStats, terms: TokenTerms, packed: PackedBatch) -> Tally:
    """Sums over the trained tokens of one micro-batch on one rank.

    Args:
        loss: scalar sum of share-weighted terms.
        entropy: [n] nats, of the trained tokens.
        stats: [T] log-ratio statistics.
        terms: [T] the objective's decisions.
        packed: the micro-batch.
    """
    mask = packed.response_mask
    kept = mask & terms.keep
    # Exact zeros off the mask: what stands there is never added, NaN included.
    weight = torch.where(mask, terms.weight.double(), 0.0)
    log_ratio = torch.where(mask, stats.token.double(), 0.0)
    gap = (packed.old_logprobs - packed.rollout_logprobs).double()
    columns = [
        mask, mask & terms.below, mask & terms.above, kept & (packed.advantages != 0),
        weight, log_ratio, log_ratio.square(),
    ]  # fmt: skip
    gaps = [gap, gap.abs(), gap.expm1() - gap]
    totals = [loss.detach().double(), *(column.double().sum() for column in columns)]
    totals += [entropy.detach().double().sum(), *(column.sum() for column in gaps)]
    bins = (BINS * (packed.position - 1)) // packed.length
    by_bin = torch.zeros(2, BINS, dtype=torch.float64, device=mask.device)
    by_bin[0].index_add_(0, bins, mask.double())
    by_bin[1].index_add_(0, bins, (mask & ~terms.keep).double())
    low, high = torch.where(mask, weight, torch.inf), torch.where(mask, weight, -torch.inf)
    return Tally(
        sums=torch.cat([torch.stack(totals), by_bin.flatten()]),
        maxima=torch.stack([high.max(), (-low).max(), gap.abs().max()]),
    )


def reduce_tallies(tallies: list[Tally], groups: ParallelGroups, device: torch.device) -> dict[str, list[float]]:
    """Join micro-batches, then data and context ranks, then pipeline stages (only the last one has any).

    Returns:
        {"sums": ..., "maxima": ...}, the same on every rank. The one place where the host waits for the device.
    """
    sums = torch.zeros(len(SUMS) + 2 * BINS, dtype=torch.float64, device=device)
    maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device)
    if tallies:
        sums = torch.stack([tally.sums for tally in tallies]).sum(0)
        maxima = torch.stack([tally.maxima for tally in tallies]).amax(0)
    sums = sum_over(sum_over(sums, groups.dp_cp), groups.pp)
    maxima = max_over(max_over(maxima, groups.dp_cp), groups.pp)
    return {"sums": sums.tolist(), "maxima": maxima.tolist()}


def token_metrics(totals: dict[str, list[float]]) -> dict[str, float]:
    """Flat `area/name` metrics from reduced totals; means are over trained tokens, 0 where there is none."""
    sums = dict(zip(SUMS, totals["sums"], strict=False))
    largest = dict(zip(MAXIMA, totals["maxima"], strict=True))
    count = max(sums["tokens"], 1.0)
    mean = {name: value / count for name, value in sums.items()}
    any_token = sums["tokens"] > 0
    metrics = {
        "loss": sums["loss"],
        "entropy": mean["entropy"],
        "gate/rejected_fraction": mean["low"] + mean["high"],
        "gate/rejected_fraction_low": mean["low"],
        "gate/rejected_fraction_high": mean["high"],
        "weight/mean": mean["weight"],
        "weight/min": -largest["minus_weight"] if any_token else 0.0,
        "weight/max": largest["weight"] if any_token else 0.0,
        "log_ratio/mean": mean["log_ratio"],
        "log_ratio/std": _spread(mean["log_ratio"], mean["log_ratio_squared"]),
        "mismatch/mean": mean["mismatch"],
        "mismatch/mean_abs": mean["mismatch_abs"],
        "mismatch/max_abs": largest["mismatch_abs"] if any_token else 0.0,
        "mismatch/kl": mean["mismatch_kl"],
        "response/tokens": sums["tokens"],
    }
    by_bin = totals["sums"][len(SUMS) :]
    for index, (valid, rejected) in enumerate(zip(by_bin[:BINS], by_bin[BINS:], strict=True)):
        metrics[f"gate/rejected_fraction_bin_{index}"] = rejected / max(valid, 1.0)
    return metrics


def _spread(mean: float, mean_square: float) -> float:
    """Population standard deviation; a NaN stays one."""
    variance = mean_square - mean * mean
    return 0.0 if variance < 0.0 else variance**0.5
