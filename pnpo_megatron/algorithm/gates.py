"""Gates: which tokens may move the policy. A gate gives inclusive bounds on w - 1 for every token.

Bounds, and not a mask, because the decision itself is then the same for all gates and is made once, on
expm1(log w): near 7e-4 float32 steps are 6e-11 there, against 6e-8 on w. A token outside its bounds adds
nothing to the loss; its weight is not truncated to a boundary. Every upper bound is finite, so a weight
that overflowed to infinity is always rejected; a NaN is in no gate's hands and stays visible.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pnpo_megatron.algorithm.ratios import RatioStats

Bounds = tuple[Tensor | float, Tensor | float]
Gate = Callable[[Tensor, RatioStats], Bounds]

OPEN_BELOW = -2.0
"""Below every w - 1."""
OPEN_ABOVE = torch.finfo(torch.float32).max
"""Above every w - 1 but infinity."""


def sqrt_band(
    advantages: Tensor, stats: RatioStats, *, low: float, high: float, reference_length: int | None = None
) -> Bounds:
    """Position-dependent acceptance, Eq. 8-9: 1 - low*h <= w <= 1 + high*h with h = sqrt(L/t).

    The prefix mean's spread shrinks as 1/sqrt(t), so h keeps the band at a constant width in standard
    deviations. `low` and `high` hold at t = L, or at t = `reference_length` if that replaces L.
    """
    dtype = stats.token.dtype
    length = stats.length if reference_length is None else torch.full_like(stats.length, reference_length)
    # A root a row and a root a column, where positions are the columns: one product an element.
    reach, shrink = length.to(dtype).sqrt_(), stats.position.to(dtype).rsqrt_()
    return shrink * (reach * -low), shrink * (reach * high)


def flat_band(advantages: Tensor, stats: RatioStats, *, low: float, high: float) -> Bounds:
    """The same tolerance at every position: 1 - low <= w <= 1 + high."""
    return -low, high


def ppo_clip(
    advantages: Tensor, stats: RatioStats, *, low: float, high: float, dual_clip: float | None = None
) -> Bounds:
    """PPO's one-sided rule: a token is rejected where the published min/clip loss has gradient zero.

    -min(w A, clip(w, 1-low, 1+high) A) is constant for A > 0 beyond 1 + high and for A < 0 below 1 - low.
    Dual clip, min(that, -c A) for A < 0, is constant beyond c as well. With A = 0 nothing is rejected.
    """
    ceiling = OPEN_ABOVE if dual_clip is None else dual_clip - 1.0
    lower = torch.full_like(advantages, OPEN_BELOW).masked_fill_(advantages < 0, -low)
    upper = torch.full_like(advantages, OPEN_ABOVE).masked_fill_(advantages < 0, ceiling)
    return lower, upper.masked_fill_(advantages > 0, high)


def no_gate(advantages: Tensor, stats: RatioStats) -> Bounds:
    """Everything is kept but a weight that overflowed."""
    return OPEN_BELOW, OPEN_ABOVE
