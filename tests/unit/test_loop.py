"""The order of the algorithm with a fake learner: what is frozen, counted, and when it stops (TRAPS H14)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.errors import TrainingFaultError
from pnpo_megatron.loop import START, Parts, Plan, train
from pnpo_megatron.types import RolloutBatch, SequenceRecord, TrainSequence

GROUPS, GROUP_SIZE, EPOCHS = 4, 2, 3


def make_batch(step: int) -> RolloutBatch:
    mask = torch.tensor([False, True, True])
    sequences, records = [], []
    for index in range(GROUPS * GROUP_SIZE):
        ids = torch.tensor([step, index, index + 1])
        logprobs = torch.tensor([0.0, -1.0, -2.0])
        sequences.append(TrainSequence(ids, mask, logprobs, advantage=1.0))
        records.append(
            SequenceRecord(
                f"p{index // GROUP_SIZE}",
                index // GROUP_SIZE,
                index % GROUP_SIZE,
                0,
                step,
                "stop",
                1.0,
                False,
                "",
            )
        )
    return RolloutBatch(step, tuple(sequences), tuple(records), tuple(r.group for r in records))


class FakeLearner:
    """Scores with a number that changes at every update, so that a re-scored batch would be seen."""

    def __init__(self, not_finite: bool = False, skip_first: bool = False):
        self.updates, self.not_finite, self.skip_first = 0, not_finite, skip_first
        self.seen: list = []

    def log_probs(self, mini_batch):
        return [torch.where(s.response_mask, -1.0 - self.updates, 0.0) for s in mini_batch.sequences]

    def update(self, mini_batch, objective, *, step):
        self.seen.append((step, mini_batch))
        self.updates += 1
        skipped = self.not_finite or (self.skip_first and self.updates == 1)
        return {"loss": 0.0, "update/skipped": float(skipped), "update/not_finite": float(self.not_finite)}

    def export_hf(self):
        return iter(())


def run(learner, plan, stop_after=None, start=START, stop_at_update=None, positions=None):
    calls, rows, positions = [], [], [] if positions is None else positions

    def finish_step(step, update):
        calls.append(("finish", step, update))
        return step == stop_after

    def sync(step):
        calls.append(("sync", step))
        return {"time/sync_s": float(step)}

    parts = Parts(
        learner=learner,
        objective=make_objective(name="pnpo"),
        collect=lambda step: (make_batch(step), {"reward/mean": float(step)}),
        compare=lambda batch: {"mismatch/mean": 0.0},
        sync=sync,
        log=lambda step, epoch, update, metrics: rows.append((step, epoch, update, dict(metrics))),
        finish_update=lambda at: positions.append(at) or at.update == stop_at_update,
        finish_step=finish_step,
    )
    return train(plan, parts, start), calls, rows


PLAN = Plan(seed=1, steps=2, epochs=EPOCHS, groups_per_update=2)


def test_updates_are_steps_times_epochs_times_mini_batches():
    learner = FakeLearner()
    last, _, rows = run(learner, PLAN)
    assert last == 2
    assert [row[2] for row in rows] == list(range(1, 2 * EPOCHS * 2 + 1))


def test_old_logprobs_advantages_and_ids_are_bitwise_the_same_over_all_epochs():
    learner = FakeLearner()
    run(learner, PLAN)
    for step in (1, 2):
        by_row: dict = {}
        for seen_step, mini_batch in learner.seen:
            if seen_step == step:
                for row, sequence in zip(mini_batch.indices, mini_batch.sequences, strict=True):
                    by_row.setdefault(row, []).append(sequence)
        assert sorted(by_row) == list(range(GROUPS * GROUP_SIZE))
        for uses in by_row.values():
            assert len(uses) == EPOCHS
            for use in uses[1:]:
                assert torch.equal(use.old_logprobs, uses[0].old_logprobs)
                assert torch.equal(use.ids, uses[0].ids)
                assert use.advantage == uses[0].advantage


def test_the_order_of_groups_changes_with_the_epoch_and_groups_stay_whole():
    learner = FakeLearner()
    run(learner, dataclasses.replace(PLAN, steps=1, epochs=8))
    orders = []
    for index in range(0, 16, 2):
        rows = [row for _, mini_batch in learner.seen[index : index + 2] for row in mini_batch.indices]
        orders.append(tuple(rows))
        assert all(rows[i] // 2 == rows[i + 1] // 2 for i in range(0, len(rows), 2))
    assert len(set(orders)) > 1


def test_step_level_metrics_stand_on_the_first_update_row_only():
    _, _, rows = run(FakeLearner(), PLAN)
    firsts = [row for row in rows if "reward/mean" in row[3]]
    assert [(row[0], row[1]) for row in firsts] == [(1, 1), (2, 1)]
    assert [row[3]["time/sync_s"] for row in firsts] == [0.0, 1.0], "the sync whose weights sampled this step"


def test_lag_counts_updates_taken_since_sampling():
    _, _, rows = run(FakeLearner(skip_first=True), dataclasses.replace(PLAN, steps=1))
    assert [row[3]["lag"] for row in rows] == [0, 0, 1, 2, 3, 4]


def test_weights_are_synced_before_the_first_batch_and_after_every_step():
    _, calls, _ = run(FakeLearner(), PLAN)
    assert calls == [
        ("sync", 0),
        ("finish", 0, 0),
        ("sync", 1),
        ("finish", 1, 6),
        ("sync", 2),
        ("finish", 2, 12),
    ]


def test_a_stop_is_honoured_at_the_end_of_a_step():
    last, _, rows = run(FakeLearner(), PLAN, stop_after=1)
    assert last == 1 and rows[-1][0] == 1


def test_repeated_updates_that_are_not_finite_stop_the_run():
    with pytest.raises(TrainingFaultError, match="3 updates in a row"):
        run(FakeLearner(not_finite=True), dataclasses.replace(PLAN, max_skipped=3))


def test_rollout_logprobs_can_be_the_old_ones():
    learner = FakeLearner()
    run(learner, dataclasses.replace(PLAN, learner_scores_old=False))
    sequence = learner.seen[0][1].sequences[0]
    assert torch.equal(sequence.old_logprobs, sequence.rollout_logprobs)


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_a_run_resumed_inside_a_batch_makes_the_updates_that_are_left_and_no_other(stop_at):
    whole = FakeLearner()
    _, _, rows = run(whole, PLAN)
    before, after, positions = FakeLearner(), FakeLearner(), []
    run(before, PLAN, stop_at_update=stop_at, positions=positions)
    after.updates = stop_at  # the weights that the checkpoint holds
    _, calls, later = run(after, PLAN, start=positions[-1])
    for row in (*later, *rows):
        row[3].pop("time/logprobs_s", None)
    assert later == rows[stop_at:]
    assert [m.indices for _, m in before.seen + after.seen] == [m.indices for _, m in whole.seen]
    for (_, ours), (_, theirs) in zip(after.seen, whole.seen[stop_at:], strict=True):
        for a, b in zip(ours.sequences, theirs.sequences, strict=True):
            assert torch.equal(a.old_logprobs, b.old_logprobs) and a.advantage == b.advantage
    assert calls[0] == ("sync", 1 if stop_at <= 6 else 2), "nothing is sampled before the batch is used up"


def test_updates_that_are_not_finite_are_counted_over_the_end_of_a_batch():
    with pytest.raises(TrainingFaultError, match="8 updates in a row"):
        run(FakeLearner(not_finite=True), dataclasses.replace(PLAN, max_skipped=8))
