"""The order of the algorithm with a fake learner: what is frozen, counted, and when it stops (TRAPS H14)."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import pytest
import torch

from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.errors import RolloutError, TrainingFaultError
from pnpo_megatron.loop import START, Parts, Plan, train
from pnpo_megatron.rollout.ahead import Ahead
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

    def finish_step(at):
        assert at.batch is None
        calls.append(("finish", at.step, at.update))
        return at.step == stop_after

    def sync(step):
        calls.append(("sync", step))
        return {"time/sync_s": float(step)}

    parts = Parts(
        learner=learner,
        objective=make_objective(name="pnpo"),
        collect=lambda step: (make_batch(step), {"reward/mean": float(step)}),
        begin=lambda step: calls.append(("begin", step)),
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


class RejectingLearner(FakeLearner):
    """Rejects more at every update of a batch: 0, 0.1, 0.2, ..."""

    def update(self, mini_batch, objective, *, step):
        lag = sum(seen == step for seen, _ in self.seen)
        return super().update(mini_batch, objective, step=step) | {"gate/rejected_fraction": lag / 10}


@pytest.mark.parametrize(("limit", "made"), [(0.05, 2), (0.2, 4), (0.39, 5), (0.9, 6)])
def test_a_batch_is_left_after_the_update_that_rejects_too_much_and_the_updates_saved_are_said(limit, made):
    last, calls, rows = run(RejectingLearner(), dataclasses.replace(PLAN, stop_rejected=limit))
    assert last == 2 and [row[2] for row in rows] == list(range(1, 2 * made + 1))
    assert [call for call in calls if call[0] == "finish"] == [(("finish"), 0, 0), ("finish", 1, made),
                                                               ("finish", 2, 2 * made)]  # fmt: skip
    said = [row[3] for row in rows if "epochs/taken" in row[3]]
    assert said == [rows[made - 1][3], rows[-1][3]]
    assert all(row["epochs/taken"] == made / 2 and row["epochs/updates_saved"] == 6 - made for row in said)


def test_a_run_resumed_inside_a_batch_leaves_it_at_the_same_update():
    plan, positions = dataclasses.replace(PLAN, stop_rejected=0.2), []
    _, _, whole = run(RejectingLearner(), plan, positions=positions)
    assert [at.made for at in positions] == [1, 2, 3] * 2, (
        "nothing is saved between leaving and the step's end"
    )
    for at in positions:
        learner = RejectingLearner()
        learner.seen = [(at.step + 1, None)] * at.made
        _, _, rows = run(learner, plan, start=at)
        again = [(row[:3], row[3]["lag"], row[3].get("epochs/taken")) for row in rows]
        assert again == [(row[:3], row[3]["lag"], row[3].get("epochs/taken")) for row in whole[at.update :]]


def test_without_a_limit_nothing_is_left_and_nothing_said():
    _, _, rows = run(RejectingLearner(), PLAN)
    assert len(rows) == 12 and not any("epochs/taken" in row[3] for row in rows)


def test_the_next_batch_is_begun_before_the_updates_and_waited_for_before_the_sync():
    learner = FakeLearner()
    _, calls, _ = run(learner, dataclasses.replace(PLAN, max_lag=1, steps=3))
    assert [call for call in calls if call[0] != "finish"] == [
        ("sync", 0), ("begin", 2), ("sync", 1), ("begin", 3), ("sync", 2), ("sync", 3)
    ]  # fmt: skip


@dataclasses.dataclass
class Sleeper(FakeLearner):
    """A learner of `seconds` an update batch, beside an engine that sleeps in `Ahead`'s thread."""

    seconds: float = 0.0

    def __post_init__(self):
        FakeLearner.__init__(self)

    def update(self, mini_batch, objective, *, step):
        if self.updates % (EPOCHS * 2) == 0:
            time.sleep(self.seconds)
        return super().update(mini_batch, objective, step=step)


def overlapped(generate_s: float, update_s: float, steps: int):
    """Seconds of each step, versions and lags of the batches, and the most users of the engine at once."""
    learner, ahead = Sleeper(update_s), Ahead(60.0)
    version, users, most, versions, ends, rows = 0, 0, 0, [], [time.monotonic()], []

    def sample(step):
        nonlocal users, most
        users += 1
        most = max(most, users)
        time.sleep(generate_s)
        users -= 1
        batch = make_batch(step)
        return dataclasses.replace(
            batch, records=tuple(dataclasses.replace(r, version=version) for r in batch.records)
        )

    def collect(step):
        batch = ahead.take(step) or sample(step)
        versions.append(batch.records[0].version)
        return batch, {}

    def sync(step):
        nonlocal version
        ahead.wait()
        assert users == 0, "weights never change under a request"
        version = step
        ends.append(time.monotonic())
        return {}

    parts = Parts(
        learner=learner, objective=make_objective(name="pnpo"), collect=collect,
        begin=lambda step: ahead.begin(step, lambda: sample(step)), compare=lambda batch: {}, sync=sync,
        log=lambda step, epoch, update, metrics: rows.append((step, metrics["lag"])),
        finish_update=lambda at: False, finish_step=lambda at: False,
    )  # fmt: skip
    train(dataclasses.replace(PLAN, steps=steps, max_lag=1, learner_scores_old=False), parts)
    ahead.close()
    return [b - a for a, b in itertools.pairwise(ends[2:])], versions, rows, most


@pytest.mark.parametrize(("generate_s", "update_s"), [(1.0, 0.5), (0.5, 1.0), (0.8, 0.8)])
def test_with_a_lag_of_one_a_step_takes_the_longer_of_generation_and_update(generate_s, update_s):
    seconds, versions, rows, most = overlapped(generate_s, update_s, steps=5)
    assert min(seconds) <= 1.1 * max(generate_s, update_s), "a busy machine adds to some steps, not to all"
    assert versions == [0, 0, 1, 2, 3], "every response's version is at least step - 1 - max_lag"
    first_lags = [next(lag for at, lag in rows if at == step) for step in range(1, 6)]
    assert first_lags == [0] + [EPOCHS * 2] * 4, "a stale batch lags by the updates of the one before"
    assert most == 1


def test_what_fails_in_the_thread_fails_the_step_and_a_late_batch_is_named():
    ahead = Ahead(0.2)
    ahead.begin(3, lambda: [][0])
    with pytest.raises(IndexError):
        ahead.take(3)
    ahead.close()
    late = Ahead(0.05)
    gone = threading.Event()
    late.begin(4, lambda: gone.wait(20))
    assert late.take(5) is None
    with pytest.raises(RolloutError, match=r"step 4: no whole batch after 0.05 s"):
        late.take(4)
    gone.set()
    late.close()
