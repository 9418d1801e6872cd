"""Does a later epoch still pull where the first did? The cosine of its gradient with the first's sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from pnpo_megatron.policy.optimizer import PIECE, copies_of


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
        gradients = [part.get_main_grads_for_grad_norm() for part in self.optimizer.chained_optimizers]
        if not self._sum:
            self._sum = [[gradient.float().clone() for gradient in part] for part in gradients]
        else:
            for sums, part in zip(self._sum, gradients, strict=True):
                torch._foreach_add_(sums, [gradient.float() for gradient in part])
        return {}

    def forget(self) -> None:
        """Give the memory back: the batch is done."""
        self._sum = []

    def _cosine(self, norm: float) -> float:
        """In float64, over all shards, as `gradient_norm` sums; not a number if either gradient is 0."""
        total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        for sums, part in zip(self._sum, self.optimizer.chained_optimizers, strict=True):
            for first, now in zip(sums, part.get_main_grads_for_grad_norm(), strict=True):
                pieces = zip(first.view(-1).split(PIECE), now.reshape(-1).split(PIECE), strict=True)
                for a, b in ((a.double(), b.double()) for a, b in pieces):
                    total += torch.stack([(a * b).sum(), a.square().sum()]) / copies_of(part)
        dist.all_reduce(total)
        product, squares = total.tolist()
        length = math.sqrt(squares) * norm
        return product / length if length else math.nan
