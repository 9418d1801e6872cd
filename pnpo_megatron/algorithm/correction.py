"""Importance of a sampled token under the learner against the engine, truncated: multiplies the loss."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """Two programs hold the same weights and still give other probabilities; this weighs the difference."""

    level: Literal["token", "sequence"]
    """token: learner / engine of each token. sequence: their product over the response, the same at every
    token; it is exact, and for long responses it is far from 1."""
    cap: float
    mask: bool = False
    """Outside 1/cap..cap a factor is 0, instead of being cut to cap."""

    def factors(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[n] float32 factors of one whole response, 1 off the mask; detached.

        Whole responses only: the factors are made before anything is split, so no split can change them.
        """
        log_ratio = torch.where(mask, old_logprobs.double() - rollout_logprobs.double(), 0.0)
        if self.level == "sequence":
            log_ratio = log_ratio.sum().expand_as(log_ratio)
        bound = math.log(self.cap)
        ratio = log_ratio.clamp(max=bound).exp()
        if self.mask:
            ratio = torch.where(log_ratio.abs() <= bound, ratio, 0.0)
        return torch.where(mask, ratio, 1.0).float()
