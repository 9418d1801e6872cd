"""A weight of your own, in one file:  PYTHONPATH=. pnpo-megatron train config.toml

A weight is a function of `RatioStats`, elementwise, that returns log-weights. Sums, positions and lengths
arrive complete, so it works unchanged under every split over ranks; the gate, the mean and all diagnostics
apply to it as to any other.
"""

from torch import Tensor

from pnpo_megatron.algorithm import RatioStats

PRIOR_TOKENS = 8.0


def shrunk_prefix(stats: RatioStats) -> Tensor:
    """Gives log C_t^(1 / (t + 8)): the prefix mean, as if eight on-policy tokens had come first.

    Early prefix means are averages of few tokens, and noisy; shrinking them does part of the gate's work
    without rejecting anything.
    """
    return stats.prefix_sum / (stats.position + PRIOR_TOKENS)
