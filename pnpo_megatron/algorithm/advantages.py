"""Group-relative outcome advantages, Eq. 10."""

from typing import Literal

import torch
from torch import Tensor

AdvantageStd = Literal["population", "sample", "none"]


def group_relative(rewards: Tensor, *, std: AdvantageStd = "population") -> Tensor:
    """(R_i - mean) / std over the G responses to one prompt, Eq. 10. There is no epsilon.

    Args:
        rewards: [P, G], one group a row. A reward that is not finite is a fault, not a wrong answer.
        std: the paper does not name it; "population" divides by G, "sample" by G - 1, "none" only centres.

    Returns:
        [P, G] float32 (float64 for float64 rewards). Faults leave their group's statistics and get 0; equal
        rewards and a group of one give exactly 0.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards is {list(rewards.shape)}; expected [P, G], one group a row")
    if std not in ("population", "sample", "none"):
        raise ValueError(f"std = {std!r}: expected 'population', 'sample' or 'none'")
    counted = rewards.isfinite()
    values = torch.where(counted, rewards, 0).to(torch.float64)
    count = counted.sum(-1, keepdim=True)
    centred = torch.where(counted, values - values.sum(-1, keepdim=True) / count.clamp(min=1), 0.0)
    if std != "none":
        freedom = count if std == "population" else count - 1
        centred = centred / (centred.square().sum(-1, keepdim=True) / freedom.clamp(min=1)).sqrt()
    # Rounding can leave equal rewards a tiny spread, which the division would blow up: so compare them.
    advantages = torch.where(counted & ~_all_equal(values, counted), centred, 0.0)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def _all_equal(values: Tensor, counted: Tensor) -> Tensor:
    """[P, 1] bool: the counted values of the row are one and the same number, or none."""
    lowest = torch.where(counted, values, torch.inf).amin(-1, keepdim=True)
    highest = torch.where(counted, values, -torch.inf).amax(-1, keepdim=True)
    return lowest >= highest
