"""Does a later epoch still pull where the first did? The cosine of its gradient with the first's sum."""

import math
from collections.abc import Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from pnpo_megatron.policy.optimizer import gradients, product_over_shards


class FirstEpochGradient:
    """One more gradient in memory: the sum over the first epoch's mini-batches of a rollout batch.

    The first epoch has ended when a sequence comes a second time. A run that was resumed inside a batch has
    not seen that batch's first epoch, and says nothing until the next.
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self.optimizer = optimizer
        self.unknown_step = 0
        """The step whose first epoch was another process's."""
        self._step, self._seen = 0, set[int]()
        self._sum: list[list[Tensor]] = []

    def compare(self, indices: Sequence[int], step: int, norm: float) -> dict[str, float]:
        """After `gradient_norm`, which gave `norm`, 0 for no gradient. Collective from the second epoch on.

        Args:
            indices: which sequences of the rollout batch the gradient is of.
        """
        if step != self._step:
            self._step, self._seen, self._sum = step, set(), []
        again = not self._seen.isdisjoint(indices)
        self._seen.update(indices)
        if step == self.unknown_step or not 0.0 < norm < math.inf:
            return {}
        if again:
            return {"gradient/cosine_first_epoch": self._cosine(norm)} if self._sum else {}
        if not self._sum:
            shards = gradients(self.optimizer)
            self._sum = [[gradient.float().clone() for gradient in part] for part in shards]
        else:
            for sums, part in zip(self._sum, gradients(self.optimizer), strict=True):
                torch._foreach_add_(sums, [gradient.float() for gradient in part])
        return {}

    def forget(self) -> None:
        """Give the memory back: the batch is done."""
        self._sum = []

    def _cosine(self, norm: float) -> float:
        """Not a number if either gradient is 0."""
        product = product_over_shards(self.optimizer, self._sum, gradients(self.optimizer))
        length = math.sqrt(product_over_shards(self.optimizer, self._sum, self._sum)) * norm
        return product / length if length else math.nan
