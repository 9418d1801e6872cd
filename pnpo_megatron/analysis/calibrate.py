"""Tolerances from measured weights: weighted quantiles, no model of their distribution (DECISIONS).

Let u = expm1(log_w) / h over the tokens of an epoch, each weighted by 1/L: the gate keeps -low <= u <= high.
A wanted acceptance a therefore needs low = -quantile(u, (1-a)/2) and high = quantile(u, (1+a)/2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pnpo_megatron.algorithm.diagnostics import BINS
from pnpo_megatron.errors import DataError


@dataclass(frozen=True)
class Tokens:
    """What calibration needs of one epoch's tokens, all [N]."""

    epoch: int
    log_ratio: Tensor
    """The log-ratio log rho_t, float64."""
    excess: Tensor
    """u = expm1(log_w) / h, float64: the gate's bounds on it are -low and high at every position."""
    position: Tensor
    length: Tensor
    advantages: Tensor

    @cached_property
    def share(self) -> Tensor:
        """1/L: every response counts alike."""
        return 1.0 / self.length.double()

    def acceptance(self, gate_low: float, gate_high: float, chosen: Tensor | None = None) -> float:
        """Weighted share of (the chosen) tokens that the gate keeps; NaN where there is none."""
        share = self.share if chosen is None else self.share * chosen
        keep = (self.excess >= -gate_low) & (self.excess <= gate_high)
        return float((share * keep).sum() / share.sum())


@dataclass(frozen=True)
class Tolerances:
    """Calibrated tolerances; a side that is not positive cannot be set."""

    gate_low: float
    gate_high: float

    @property
    def usable(self) -> bool:
        """Both sides are positive."""
        return self.gate_low > 0 and self.gate_high > 0


def excess(log_weight: Tensor, position: Tensor, length: Tensor | int, *, flat: bool = False) -> Tensor:
    """The gate's u = expm1(log_w) / h with h = sqrt(L/t) (Eq. 8), or h = 1 for a flat gate; float64."""
    above_one = torch.expm1(log_weight.double())
    if flat:
        return above_one
    return above_one / (torch.as_tensor(length).double() / position.double()).sqrt()


def calibrate(tokens: Tokens, acceptance: float) -> Tolerances:
    """The band that keeps `acceptance` of the tokens and rejects equally many on either side.

    Raises:
        DataError: no token, or a weight that is NaN.
    """
    if len(tokens.excess) == 0:
        raise DataError(f"epoch {tokens.epoch}: no trained token was dumped; dump a step with responses")
    bad = int(tokens.excess.isnan().sum())
    if bad:
        raise DataError(
            f"epoch {tokens.epoch}: {bad} weights are NaN; that update was skipped, dump another step"
        )
    tail = (1.0 - acceptance) / 2.0
    low, high = weighted_quantiles(tokens.excess, tokens.share, (tail, 1.0 - tail))
    return Tolerances(gate_low=-low, gate_high=high)


def weighted_quantiles(values: Tensor, weights: Tensor, levels: Sequence[float]) -> list[float]:
    """The smallest value at which the weight of all values up to it reaches each level of the total."""
    ordered, order = values.sort()
    reached = weights[order].cumsum(0)
    places = torch.searchsorted(reached, reached[-1] * torch.tensor(levels, dtype=reached.dtype))
    return [float(value) for value in ordered[places.clamp(max=len(ordered) - 1)]]


def slices(tokens: Tokens, tolerances: Tolerances) -> dict[str, list[tuple[str, float, float]]]:
    """What is kept of tenths of the response, of length classes (powers of two) and of the advantage's signs:
    (name, part of all tokens, part of them that the gate keeps), each token weighted by 1/L."""
    tenth = (BINS * (tokens.position.long() - 1)) // tokens.length.long()
    power = torch.log2(tokens.length.double()).floor().long()
    signs = {"A > 0": tokens.advantages > 0, "A = 0": tokens.advantages == 0, "A < 0": tokens.advantages < 0}
    chosen = {
        "position t/L": {f"{n / BINS:.1f}-{(n + 1) / BINS:.1f}": tenth == n for n in range(BINS)},
        "response length": {f"{2**p}-{2 ** (p + 1) - 1}": power == p for p in sorted(set(power.tolist()))},
        "advantage": {name: mask for name, mask in signs.items() if mask.any()},
    }

    def one(name: str, mask: Tensor) -> tuple[str, float, float]:
        part = float((tokens.share * mask).sum() / tokens.share.sum())
        return name, part, tokens.acceptance(tolerances.gate_low, tolerances.gate_high, mask)

    return {heading: [one(name, mask) for name, mask in masks.items()] for heading, masks in chosen.items()}
