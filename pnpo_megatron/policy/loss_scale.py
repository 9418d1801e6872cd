"""How Megatron-Core rescales a loss, and what cancels it: the one place that knows (megatron-core 0.16.1).

The wanted gradient is the plain sum, over ranks and micro-batches, of terms that already carry their share of
the mean over the whole mini-batch. What Megatron would make of it, where, and what is done about it:

- x CP / micro-batches, if the loss function returns 2 values (schedules.py:264): it returns 3.
- 1 / tokens / micro-batches, for 3 values without per-token mode (schedules.py:259): per-token mode is on.
- 1 / (DP x CP) on every gradient, decided when DDP is built (distributed_data_parallel.py:254): per-token
  mode is set before that, see `require`; set later, gradients come out 1/DP too small.
- 1 / (token counts returned, summed over micro-batches and DP x CP) in per-token mode, unless that sum is 0
  (finalize_model_grads.py, last lines): a dense model returns counts of 0; with experts see below.
- x routed tokens on auxiliary losses, in per-token mode (router.py:456): see below.

A mixture of experts adds auxiliary losses inside the router, each multiplied by the tokens the rank routes.
To turn them into a mean over micro-batches, the counts returned must add up to the tokens routed by *one*
context-parallel rank: each holds a part of the same auxiliary loss (moe_utils.py:73), so only the first one
counts. The policy loss is multiplied by the same sum, known from the packing beforehand, and comes out whole.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossScale:
    """The scale of one update, the same on every rank but for `counts`."""

    total: int
    """Routed tokens that Megatron will divide by; 0 for a dense model, where it divides by nothing."""
    counts: bool
    """Whether this rank's tokens are part of `total`."""
    split: int = 1
    """Tensor-parallel ranks that share a micro-batch's tokens under sequence parallelism."""

    def __call__(self, loss: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """What a Megatron loss function returns first: the scaled loss and the token count.

        Args:
            loss: scalar sum of share-weighted terms of this micro-batch on this rank.
            tokens: T, padded tokens of the micro-batch on this rank.
        """
        count = tokens // self.split if self.total and self.counts else 0
        return loss * max(self.total, 1), torch.tensor(count, dtype=torch.int, device=loss.device)


def loss_scale(config: Any, micro_batch_tokens: list[int], *, cp_rank: int) -> LossScale:
    """The scale for one update.

    Args:
        micro_batch_tokens: T of every micro-batch of every data-parallel rank, dummies included.
        cp_rank: this rank's place in its context-parallel group.
    """
    split = config.tensor_model_parallel_size if config.sequence_parallel else 1
    experts = config.num_moe_experts is not None
    total = sum(tokens // split for tokens in micro_batch_tokens) if experts else 0
    return LossScale(total=total, counts=cp_rank == 0, split=split)


def require(config: Any) -> None:
    """Refuse a model built without per-token mode: routers and DDP read the flag when they are made.

    Raises:
        ValueError: `calculate_per_token_loss` is off.
    """
    if not config.calculate_per_token_loss:
        raise ValueError(
            "TransformerConfig.calculate_per_token_loss = False: Megatron would divide gradients by the "
            "number of ranks; build the model with calculate_per_token_loss = True"
        )
