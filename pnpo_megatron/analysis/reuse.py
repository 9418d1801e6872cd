"""What reusing a rollout batch buys: step(K) = G + K*T, and what follows from it. Pure arithmetic.

G is everything a rollout batch costs once (generate, reward, old log-probs, weight sync), T one epoch of
updates. Where generation runs beside training the step is the longer of the two: max(G, K*T).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import NamedTuple

from pnpo_megatron.errors import ConfigError


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step, split into what reuse saves and what it does not."""

    generation_s: float
    """G: seconds a rollout batch costs once."""
    update_s: float
    """T: seconds of one epoch of optimizer updates."""
    overlapped: bool = False
    """Generation of the next batch runs beside the updates of this one."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What G is made of, seconds; empty when it was solved from whole steps."""
    residuals: Mapping[int, float] = field(default_factory=dict)
    """Measured minus fitted seconds of a step, by K."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.update_s) and self.update_s > 0):
            raise ConfigError(
                f"optimizer time is {self.update_s:.4g} s an epoch, expected more than 0: a step with more "
                "epochs must take longer; measure whole steps without evaluation or checkpoints, e.g. "
                "--step-seconds 1=283 4=510"
            )
        if not (math.isfinite(self.generation_s) and self.generation_s >= 0):
            raise ConfigError(
                f"generation time is {self.generation_s:.4g} s a batch, expected 0 or more: K epochs cannot "
                "take more than K times one epoch's step; check the seconds, e.g. --step-seconds 1=283 4=510"
            )

    def step_s(self, epochs: int) -> float:
        """Seconds of one step with K epochs."""
        optimizer = epochs * self.update_s
        return max(self.generation_s, optimizer) if self.overlapped else self.generation_s + optimizer

    def speedup(self, epochs: int) -> float:
        """Time of one epoch a batch over time of K, for the same number of optimizer updates."""
        return epochs * self.step_s(1) / self.step_s(epochs)

    @property
    def ceiling(self) -> float:
        """What the speed-up approaches as K grows: the optimizer's own time is never saved."""
        return self.step_s(1) / self.update_s


class Regime(NamedTuple):
    """One choice of K at a fixed number of optimizer updates."""

    epochs: int
    steps: float
    step_s: float
    hours: float
    responses: float
    generation_share: float
    """G over the seconds of a step; above a half, reuse is a strong lever."""
    speedup: float
    fleet_ratio: float
    """Seconds of generation a second of optimizer work: the rollout capacity that one trainer needs."""


@dataclass(frozen=True)
class Recommendation:
    """The chosen K and the sentence that explains it."""

    epochs: int
    reason: str


@dataclass(frozen=True)
class ReuseTax:
    """Score lost by K epochs against one, at the same number of updates; positive is a loss."""

    points: float
    stderr: float


def split_step_cost(step_seconds: Mapping[int, float], *, overlapped: bool = False) -> StepCost:
    """Generation and optimizer seconds from measured steps, by least squares on step(K) = G + K*T.

    Args:
        step_seconds: seconds of a whole step, by number of epochs K; at least two.
        overlapped: the cost is to be used as max(G, K*T); the points must still come from serial steps.

    Raises:
        ConfigError: fewer than two different K, or a split with T <= 0 or G < 0.
    """
    if len(step_seconds) < 2:
        raise ConfigError(
            f"{len(step_seconds)} step time given, expected two or more with different K; e.g. "
            "--step-seconds 1=283 4=510"
        )
    update_s, generation_s = linear_regression(list(step_seconds), list(step_seconds.values()))
    if abs(generation_s) < 1e-9 * max(
        step_seconds.values()
    ):  # rounding of the subtraction, not a negative time
        generation_s = 0.0
    residuals = {k: s - (generation_s + k * update_s) for k, s in sorted(step_seconds.items())}
    return StepCost(generation_s, update_s, overlapped=overlapped, residuals=residuals)


def regime(cost: StepCost, epochs: int, *, updates: int, updates_per_epoch: int, responses: int) -> Regime:
    """Hours and responses of a run of `updates` optimizer updates, with `responses` sampled a batch."""
    steps, step_s = updates / (epochs * updates_per_epoch), cost.step_s(epochs)
    return Regime(
        epochs,
        steps,
        step_s,
        hours=steps * step_s / 3600.0,
        responses=steps * responses,
        generation_share=cost.generation_s / step_s,
        speedup=cost.speedup(epochs),
        fleet_ratio=cost.generation_s / (epochs * cost.update_s),
    )


def balanced_epochs(cost: StepCost) -> int:
    """The smallest power of two K with G <= K*T: from there on, most of a step is optimizer work."""
    epochs = 1
    while cost.generation_s > epochs * cost.update_s:
        epochs *= 2
    return epochs


def recommend(cost: StepCost, tax: Mapping[int, ReuseTax] | None = None) -> Recommendation:
    """`balanced_epochs`, halved for as long as the measured tax of that K exceeds its standard error."""
    tax = tax or {}
    best = epochs = balanced_epochs(cost)
    while epochs > 1 and epochs in tax and tax[epochs].points > tax[epochs].stderr:
        epochs //= 2
    reason = f"K = {best} is the smallest power of two with G <= K*T"
    if epochs < best:
        reason += f"; lowered, because the measured tax of K = {2 * epochs} exceeds its standard error"
    if epochs > 1 and epochs not in tax:
        reason += f"; the tax of K = {epochs} was not measured"
    return Recommendation(epochs, reason)
