"""The algorithm on one page. Nothing here knows how work is split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from pnpo_megatron.algorithm.objective import Objective
from pnpo_megatron.data.batching import mini_batches
from pnpo_megatron.errors import TrainingFaultError
from pnpo_megatron.types import Learner, MiniBatch, RolloutBatch

Metrics = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """The numbers the loop needs."""

    seed: int
    steps: int
    epochs: int
    """K: policy-update epochs per rollout batch."""
    groups_per_update: int
    learner_scores_old: bool = True
    """Old log-probs from the learner (default) or as the sampler reported them."""
    max_skipped: int = 8


@dataclass(frozen=True)
class Parts:
    """What `build` made. Every rank calls them in the same order."""

    learner: Learner
    objective: Objective
    collect: Callable[[int], tuple[RolloutBatch, Metrics]]
    """P prompts x G responses of a step, with rewards and advantages (Eq. 10)."""
    compare: Callable[[RolloutBatch], Metrics]
    """Learner against sampler on a scored batch; raises when they disagree."""
    sync: Callable[[int], Metrics]
    """Send the learner's weights to the sampler; the argument is their step."""
    log: Callable[[int, int, int, Mapping[str, float]], None]
    """step, epoch, update, metrics."""
    finish_step: Callable[[int, int], bool]
    """After step and update: evaluate, export and save what is due; True to stop early."""


def train(plan: Plan, parts: Parts, *, done: int = 0, update: int = 0) -> int:
    """Sample, score, reuse K times, sync, repeat (PNPO, section 3.2).

    Args:
        done, update: finished rollout batches and updates of the run that is resumed.

    Returns:
        The last finished step; less than `plan.steps` if stopped early.
    """
    learner, objective = parts.learner, parts.objective
    once = parts.sync(done)
    if done == 0 and parts.finish_step(0, 0):
        return 0

    for step in range(done + 1, plan.steps + 1):
        batch, sampled = parts.collect(step)
        batch, scored = score(plan, parts, batch)  # frozen from here: reused, never changed
        once = {**sampled, **scored, **parts.compare(batch), **once}
        taken, skipped = 0, 0

        for epoch in range(1, plan.epochs + 1):
            for mini_batch in updates_of(plan, objective, batch, epoch):
                metrics = learner.update(mini_batch, objective, step=step)  # weight and gate recomputed here
                update += 1
                parts.log(step, epoch, update, {"lag": taken, **metrics, **once})
                once = {}
                taken += not metrics["update/skipped"]
                skipped = skipped + 1 if metrics["update/not_finite"] else 0
                if skipped >= plan.max_skipped:
                    raise TrainingFaultError(
                        f"{skipped} updates in a row had a loss or gradient that is not finite (last: "
                        f"update {update}); lower optimizer.lr or optimizer.clip_grad, or look at this "
                        "step's rollouts"
                    )

        once = parts.sync(step)
        if parts.finish_step(step, update):
            return step
    return plan.steps


def updates_of(plan: Plan, objective: Objective, batch: RolloutBatch, epoch: int) -> Sequence[MiniBatch]:
    """The M mini-batches of one epoch: whole groups, permuted by (seed, step, epoch)."""
    seed = (plan.seed, "order", batch.step, epoch)
    return mini_batches(batch, plan.groups_per_update, mean=objective.mean, seed=seed)


def score(plan: Plan, parts: Parts, batch: RolloutBatch) -> tuple[RolloutBatch, Metrics]:
    """Old log-probs, from the first epoch's mini-batches and packing: every weight is 1 at update 1."""
    start = perf_counter()
    if plan.learner_scores_old:
        batch = scored_by(parts.learner, batch, updates_of(plan, parts.objective, batch, epoch=1))
    else:
        batch = batch.with_old_logprobs([sequence.rollout_logprobs for sequence in batch.sequences])
    return batch, {"time/logprobs_s": perf_counter() - start}


def scored_by(learner: Learner, batch: RolloutBatch, mini_batches: Iterable[MiniBatch]) -> RolloutBatch:
    """The batch with the learner's log-probs, computed mini-batch by mini-batch."""
    old: dict[int, Tensor] = {}
    for mini_batch in mini_batches:
        old.update(zip(mini_batch.indices, learner.log_probs(mini_batch), strict=True))
    return batch.with_old_logprobs([old[index] for index in range(len(batch.sequences))])
