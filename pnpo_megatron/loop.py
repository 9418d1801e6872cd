"""The algorithm on one page. Nothing here knows how work is split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from torch import Tensor

from pnpo_megatron.algorithm.correction import Correction
from pnpo_megatron.algorithm.objective import Objective
from pnpo_megatron.data.batching import corrected, mini_batches
from pnpo_megatron.errors import TrainingFaultError
from pnpo_megatron.types import Counts, Learner, MiniBatch, RolloutBatch

Metrics = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """The numbers the loop needs."""

    seed: int
    steps: int
    epochs: int
    """K: policy-update epochs per rollout batch."""
    groups_per_update: int
    max_lag: int = 0
    """1: the next batch is sampled during the updates on this one."""
    learner_scores_old: bool = True
    """Old log-probs from the learner (default) or as the sampler reported them."""
    scored_early: bool = False
    """`collect` gives them with the batch."""
    reference: bool = False
    """The loss also looks at log-probs of the run's first weights."""
    correction: Correction | None = None
    """Of the loss, for the difference between learner and sampler."""
    max_skipped: int = 8
    stop_rejected: float | None = None
    """Leave the batch after an update whose rejected fraction passes this."""


@dataclass(frozen=True)
class Position(Counts):
    """All that the loop needs to go on."""

    batch: RolloutBatch | None = None
    """The frozen batch of step + 1, if it is in work."""

    def after(self, metrics: Metrics) -> Position:
        """One update further."""
        return replace(
            self,
            update=self.update + 1,
            made=self.made + 1,
            lag=self.lag + (not metrics["update/skipped"]),
            not_finite=self.not_finite + 1 if metrics["update/not_finite"] else 0,
        )


START = Position()


@dataclass(frozen=True)
class Parts:
    """What `build` made. Every rank calls them in the same order."""

    learner: Learner
    objective: Objective
    collect: Callable[[int], tuple[RolloutBatch, Metrics]]
    """P prompts x G responses of a step, with rewards and advantages (Eq. 10)."""
    begin: Callable[[int], None]
    """Start on the batch of a step, with the weights that the sampler holds; `collect` waits for it."""
    compare: Callable[[RolloutBatch], Metrics]
    """Learner against sampler on a scored batch; raises when they disagree."""
    sync: Callable[[int], Metrics]
    """Send the learner's weights to the sampler; the argument is their step."""
    log: Callable[[int, int, int, Mapping[str, float]], None]
    """step, epoch, update, metrics."""
    finish_update: Callable[[Position], bool]
    """After an update: save what is due inside a batch; True to stop early."""
    finish_step: Callable[[Position], bool]
    """Between two batches: evaluate, export and save what is due; True to stop early."""


def train(plan: Plan, parts: Parts, start: Position = START) -> int:
    """Sample, score, reuse K times, sync, repeat (PNPO, section 3.2).

    Args:
        start: where the run that is resumed was saved, between two batches or inside one.

    Returns:
        The last finished step; less than `plan.steps` if stopped early.
    """
    learner, objective, at = parts.learner, parts.objective, start
    once = {} if at.batch else parts.sync(at.step)  # inside a batch nothing is sampled
    if at == START and parts.finish_step(at):
        return 0

    for step in range(at.step + 1, plan.steps + 1):
        if at.batch is None:
            batch, sampled = parts.collect(step)
            batch, scored = score(plan, parts, batch)  # frozen from here: reused, never changed
            once = {**sampled, **scored, **parts.compare(batch), **once}
            stale = batch.records[0].version < step - 1  # its weights are older: they lag by the last updates
            at = replace(at, batch=batch, made=0, lag=0, behind=at.lag if plan.max_lag and stale else 0)
        if plan.max_lag and step < plan.steps:
            parts.begin(step + 1)

        for epoch, mini_batch in updates_left(plan, objective, at):
            metrics = learner.update(mini_batch, objective, step=step)  # weight and gate recomputed here
            leave = plan.stop_rejected is not None and metrics["gate/rejected_fraction"] > plan.stop_rejected
            lag = {"lag": at.lag + at.behind}
            parts.log(step, epoch, at.update + 1, {**lag, **metrics, **once, **reuse(plan, at, leave)})
            at, once = at.after(metrics), {}
            if at.not_finite >= plan.max_skipped:
                raise TrainingFaultError(
                    f"{at.not_finite} updates in a row had a loss or gradient that is not finite (last: "
                    f"update {at.update}); lower optimizer.lr or optimizer.clip_grad, or look at this "
                    "step's rollouts"
                )
            if leave:
                break  # before anything is saved: a run resumed inside the batch decides alike, here
            if parts.finish_update(at):
                return at.step

        at, once = replace(at, step=step, batch=None), parts.sync(step)
        if parts.finish_step(at):
            return step
    return plan.steps


def reuse(plan: Plan, at: Position, leave: bool) -> Metrics:
    """Where batches may be left early, on the batch's last row: the epochs taken, and the updates saved."""
    if plan.stop_rejected is None:
        return {}
    assert at.batch is not None
    each = len(set(at.batch.groups)) // plan.groups_per_update
    made = at.made + 1
    if not (leave or made == plan.epochs * each):
        return {}
    return {"epochs/taken": made / each, "epochs/updates_saved": float(plan.epochs * each - made)}


def updates_left(plan: Plan, objective: Objective, at: Position) -> Iterator[tuple[int, MiniBatch]]:
    """(epoch, mini-batch) of the batch in work: K x M in all, less those made before the run was resumed."""
    assert at.batch is not None
    made, batch = at.made, corrected(at.batch, plan.correction)
    for epoch in range(1, plan.epochs + 1):
        updates = updates_of(plan, objective, batch, epoch)
        yield from ((epoch, mini_batch) for mini_batch in updates[made:])
        made = max(0, made - len(updates))


def updates_of(plan: Plan, objective: Objective, batch: RolloutBatch, epoch: int) -> Sequence[MiniBatch]:
    """The M mini-batches of one epoch: whole groups, permuted by (seed, step, epoch)."""
    seed = (plan.seed, "order", batch.step, epoch)
    return mini_batches(batch, plan.groups_per_update, mean=objective.mean, seed=seed)


def score(plan: Plan, parts: Parts, batch: RolloutBatch) -> tuple[RolloutBatch, Metrics]:
    """Old log-probs, from the first epoch's mini-batches and packing: every weight is 1 at update 1."""
    start, updates = perf_counter(), updates_of(plan, parts.objective, batch, epoch=1)
    if plan.reference:
        batch = batch.with_reference_logprobs(scored_by(parts.learner.reference_log_probs, updates))
    if plan.scored_early:
        return batch, {}
    if plan.learner_scores_old:
        batch = batch.with_old_logprobs(scored_by(parts.learner.log_probs, updates))
    else:
        batch = batch.with_old_logprobs([sequence.rollout_logprobs for sequence in batch.sequences])
    return batch, {"time/logprobs_s": perf_counter() - start}


def scored_by(
    log_probs: Callable[[MiniBatch], list[Tensor]], mini_batches: Iterable[MiniBatch]
) -> list[Tensor]:
    """Log-probs of a whole batch, in its order, computed mini-batch by mini-batch."""
    found: dict[int, Tensor] = {}
    for mini_batch in mini_batches:
        found.update(zip(mini_batch.indices, log_probs(mini_batch), strict=True))
    return [found[index] for index in sorted(found)]
