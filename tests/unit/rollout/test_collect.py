"""A rollout batch: prompt order whatever finishes first, faults apart from wrong answers (TRAPS H03, H05)."""

from __future__ import annotations

import math

import pytest
import torch

from pnpo_megatron.errors import DataError, RewardFaultError, RolloutError
from pnpo_megatron.rollout.collect import CollectSettings, collect
from pnpo_megatron.rollout.store import RolloutStore
from pnpo_megatron.types import Prompt, RewardResult, Rollout, RolloutGroup, Sampling

PROMPTS = [Prompt(id=f"p{i}", token_ids=(1, 2, 3 + i), answer=str(i), text=f"q{i}") for i in range(12)]


class FakeSampler:
    """Returns groups in reverse order, so that prompt order has to be restored."""

    def __init__(self, drop=()):
        self.drop = drop

    def generate(self, prompts, group_size, sampling, seed):
        for prompt in reversed(prompts):
            if prompt.id not in self.drop:
                yield RolloutGroup(prompt, tuple(self._rollout(prompt, i) for i in range(group_size)))

    def _rollout(self, prompt, sample):
        length = 2 + sample
        return Rollout(
            torch.arange(length) + 10 * sample,
            torch.full((length,), -0.5),
            "length" if sample == 3 else "stop",
            sample=sample,
            seed=7,
            version=0,
            text=f"{prompt.id}/{sample}",
        )


def grade_from(values):
    def one(item):
        value = values(item)
        return RewardResult(*value) if isinstance(value, tuple) else RewardResult(value)

    return lambda inputs: lambda: [one(item) for item in inputs]


def first_is_right(item):
    return 1.0 if item.text.endswith("/0") else 0.0


def run(sampler=None, values=first_is_right, **changes):
    settings = CollectSettings(prompts=3, group_size=4, sampling=Sampling(1.0, 8), seed=5, **changes)
    order = iter(PROMPTS)

    def take(n, exclude):
        return [next(order) for _ in range(n)]

    return collect(4, settings, take, sampler or FakeSampler(), grade_from(values))


def test_sequences_stand_in_prompt_order_with_their_groups_whole():
    batch, _ = run()
    assert [record.text for record in batch.records] == [f"p{p}/{s}" for p in range(3) for s in range(4)]
    assert batch.groups == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)


def test_the_mask_covers_the_response_and_nothing_of_the_prompt():
    batch, _ = run()
    sequence = batch.sequences[5]
    assert sequence.ids.tolist() == [1, 2, 4, 10, 11, 12]
    assert sequence.response_mask.tolist() == [False] * 3 + [True] * 3
    assert sequence.rollout_logprobs.tolist() == [0.0] * 3 + [-0.5] * 3


def test_advantages_are_group_relative_by_hand():
    batch, metrics = run()
    expected = [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]
    assert [s.advantage for s in batch.sequences[:4]] == pytest.approx(expected, rel=1e-12)
    assert metrics["reward/mean"] == 0.25
    assert metrics["response/length_mean"] == 3.5
    assert metrics["response/truncated_fraction"] == 0.25


def test_a_fault_leaves_the_statistics_and_gets_advantage_zero():
    def one_fault(item):
        return (None, False, "worker died") if item.text == "p0/1" else first_is_right(item)

    batch, metrics = run(values=one_fault, max_fault_rate=0.2)
    by_hand = [math.sqrt(2), 0.0, -1 / math.sqrt(2), -1 / math.sqrt(2)]
    assert [s.advantage for s in batch.sequences[:4]] == pytest.approx(by_hand, rel=1e-12)
    assert batch.records[1].reward is None
    assert metrics["reward/faults"] == 1 and metrics["reward/mean"] == pytest.approx(3 / 11)


def test_too_many_faults_stop_the_run_and_name_the_first():
    with pytest.raises(
        RewardFaultError, match=r"12 of 12 rewards .*max_fault_rate = 0.01; first: worker died"
    ):
        run(values=lambda item: (None, False, "worker died"))


def test_a_timeout_is_a_wrong_answer_and_is_counted():
    batch, metrics = run(
        values=lambda item: (0.0, True) if item.text.endswith("/1") else first_is_right(item)
    )
    assert metrics["reward/timeouts"] == 3 and metrics["reward/faults"] == 0
    assert batch.sequences[1].advantage < 0


def test_a_prompt_that_fails_is_replaced_by_the_next_one_and_the_others_are_kept():
    batch, _ = run(FakeSampler(drop={"p1"}))
    assert [record.prompt_id for record in batch.records[::4]] == ["p0", "p3", "p2"]


def test_prompts_that_keep_failing_end_the_run_and_are_named():
    with pytest.raises(RolloutError, match=r"1 prompts gave no responses, first 'p\d'"):
        run(FakeSampler(drop={f"p{i}" for i in range(1, 40)} - {"p2"}))


def test_permuted_rewards_keep_their_group_and_their_sum():
    plain, permuted = run()[0], run(permute_rewards=True)[0]
    for start in (0, 4, 8):
        assert sorted(r.reward for r in permuted.records[start : start + 4]) == [0.0, 0.0, 0.0, 1.0]
    assert [r.reward for r in plain.records] != [r.reward for r in permuted.records]


def test_a_stored_batch_replays_bitwise(tmp_path):
    batch, _ = run()
    scored = batch.with_old_logprobs([s.rollout_logprobs - 1 for s in batch.sequences])
    store = RolloutStore(tmp_path)
    store.write(scored)
    store.flush()
    replayed = store.read(4)
    assert replayed.records == batch.records and replayed.groups == batch.groups
    for a, b in zip(replayed.sequences, batch.sequences, strict=True):
        assert torch.equal(a.ids, b.ids) and torch.equal(a.response_mask, b.response_mask)
        assert torch.equal(a.rollout_logprobs, b.rollout_logprobs)
        assert a.advantage == b.advantage and a.old_logprobs is None


def test_keep_drops_old_binary_files_but_never_the_json_lines(tmp_path):
    store = RolloutStore(tmp_path, keep=1)
    for step in (1, 2):
        batch, _ = run()
        store.write(batch.__class__(step, batch.sequences, batch.records, batch.groups))
        store.flush()
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["step_000001.jsonl", "step_000002.jsonl", "step_000002.safetensors"]
    with pytest.raises(DataError, match=r"step 1 cannot be replayed"):
        store.read(1)
