"""Log-ratios on a fixed grid, so that sums do not depend on how a sequence is cut up.

Floating-point addition is not associative: a token near its bound would be kept at C = 2 and rejected at
C = 4. Multiples of one step are different. Rounded to multiples of 2^-36 nats, every sum below 2^17 nats
fits the 53 bits of a float64 and is exact, so it is the same number in any order. Sums of contiguous
tokens are differences of two prefix sums; if no prefix sum of a response passes 2^16 = 65,536 nats,
every split and every scan of it is bitwise equal. Beyond that sums are still right to 2^-53 relative.

float64 and not int64 holds the sums because NaN and infinity then travel by themselves: a NaN spoils the
prefix sums from its own position on, and the response sum, and nothing before it.
"""

import torch
from torch import Tensor

GRID_NATS = 2.0**-36
"""One grid step: 1.5e-11 nats, far below float32's steps at the sizes the gate looks at."""


def to_grid(log_ratio: Tensor) -> Tensor:
    """The nearest multiples of `GRID_NATS`, in float64; NaN and infinity stay what they are.

    Args:
        log_ratio: any shape, float32 or float64, nats. Scaling by a power of two is exact, so a float32
            value of 2^-13 nats or more does not change at all.
    """
    ticks = (log_ratio * (1.0 / GRID_NATS)).round_()
    return ticks.to(torch.float64).mul_(GRID_NATS)
