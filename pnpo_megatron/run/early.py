"""Old log-probs of finished groups, computed while the others are sampled (rollout.overlap_logprobs).

Groups that stand beside each other in the batch make a part, which is scored as soon as all of them are
there. What is scored together never depends on who came first, so the numbers do not either; but it is not
what is trained together, so weights at update 1 are 1 within rounding only.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from queue import Empty, SimpleQueue
from time import perf_counter

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pnpo_megatron.loop import Metrics
from pnpo_megatron.parallel.rank_zero import from_rank_zero
from pnpo_megatron.run.batches import Batches
from pnpo_megatron.types import Learner, MiniBatch, RolloutBatch, TrainSequence


class EarlyScores:
    """Takes a step's batch with its old log-probs. Collective over `control`."""

    def __init__(self, learner: Learner, control: ProcessGroup | None, batches: Batches, part: int) -> None:
        """`part`: groups that are scored together."""
        self._learner, self._control, self._batches, self._part = learner, control, batches, part
        self._prompts, self._group_size = batches.config.rollout.prompts, batches.config.rollout.group_size

    def __call__(self, step: int, doing: str) -> tuple[RolloutBatch, Metrics]:
        """The batch of `step`, scored."""
        arrived: SimpleQueue[tuple[int, Sequence[TrainSequence]] | None] = SimpleQueue()
        waiting: dict[int, Sequence[TrainSequence]] = {}
        from_rank_zero(lambda: self._batches.begin_new(step, arrived.put), self._control, doing)
        early: dict[tuple[int, ...], tuple[MiniBatch, list[Tensor]]] = {}
        while (
            part := from_rank_zero(lambda: self._next(arrived, waiting), self._control, doing)
        ) is not None:
            early[part.indices] = part, self._learner.log_probs(part)
        batch, metrics = from_rank_zero(lambda: self._batches.take_told(step), self._control, doing)
        start = perf_counter()
        old: list[Tensor] = []
        for part in self._parts(batch):
            scored, logprobs = early.get(part.indices, (None, []))
            old += logprobs if scored and _same(scored, part) else self._learner.log_probs(part)
        return batch.with_old_logprobs(old), metrics | {"time/logprobs_s": perf_counter() - start}

    def _next(
        self,
        arrived: SimpleQueue[tuple[int, Sequence[TrainSequence]] | None],
        waiting: dict[int, Sequence[TrainSequence]],
    ) -> MiniBatch | None:
        """The next part that is whole; None when no more groups come."""
        try:
            while (one := arrived.get(timeout=self._batches.timeout_s)) is not None:
                place, waiting[place] = one
                first = place - place % self._part
                places = range(first, min(first + self._part, self._prompts))
                if all(each in waiting for each in places):
                    return self._joined(first, [waiting[each] for each in places])
        except Empty:  # whoever samples has deadlines of its own: `take` tells
            return None
        return None

    def _parts(self, batch: RolloutBatch) -> Iterator[MiniBatch]:
        size = self._group_size
        groups = [batch.sequences[row : row + size] for row in range(0, len(batch.sequences), size)]
        for first in range(0, len(groups), self._part):
            yield self._joined(first, groups[first : first + self._part])

    def _joined(self, first: int, groups: Sequence[Sequence[TrainSequence]]) -> MiniBatch:
        sequences = tuple(chain.from_iterable(groups))
        row = first * self._group_size
        return MiniBatch(sequences, (0.0,) * len(sequences), tuple(range(row, row + len(sequences))))


def _same(one: MiniBatch, other: MiniBatch) -> bool:
    """Not where a group's place was given to another prompt after all."""
    pairs = zip(one.sequences, other.sequences, strict=True)
    return all(torch.equal(a.ids, b.ids) and torch.equal(a.response_mask, b.response_mask) for a, b in pairs)
