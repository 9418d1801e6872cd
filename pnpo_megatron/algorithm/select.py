"""Selecting by a mask without multiplying: what is outside the mask may be NaN or infinite."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def zero_outside_(values: Tensor, mask: Tensor) -> Tensor:
    """In place: `values` where the mask is True, exactly +0 elsewhere, whatever stood there.

    Args:
        values: float32 or float64, of the shape of `mask`; without a gradient.
        mask: bool.

    The bit patterns are multiplied, as integers, not the numbers: the result of `masked_fill_`, ten times as
    fast on CPUs.
    """
    values.view(_INTEGER[values.dtype]).mul_(mask)
    return values
