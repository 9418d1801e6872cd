"""A rollout batch: prompt order whatever finishes first, faults apart from wrong answers (TRAPS H03, H05)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pnpo_megatron.data.batching import mini_batches
from pnpo_megatron.data.order import PromptSource
from pnpo_megatron.data.packing import flatten, pack
from pnpo_megatron.data.partition import Layout
from pnpo_megatron.errors import DataError, NoResponsesError, RewardFaultError, RolloutError
from pnpo_megatron.rollout.collect import CollectSettings, Overlong, collect
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
        if all(prompt.id in self.drop for prompt in prompts):
            raise NoResponsesError("all prompts failed")

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
    take = PromptSource(PROMPTS, seed=0, shuffle=False).take

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


def only(*solved):
    """Prompts with one right answer of four; the others' groups are all wrong."""
    return lambda item: float(item.text in {f"p{i}/0" for i in solved})


def test_groups_of_equal_rewards_are_replaced_by_the_next_prompts_and_counted():
    batch, metrics = run(values=only(0, 4, 5), dynamic=True)
    # p1 and p2 teach nothing; p3 comes in place of p1 and teaches nothing either, so p5 comes.
    assert [record.prompt_id for record in batch.records[::4]] == ["p0", "p5", "p4"]
    assert all(any(s.advantage for s in batch.sequences[i : i + 4]) for i in (0, 4, 8))
    assert metrics["rollout/dropped_groups"] == 3 and metrics["rollout/refills"] == 2
    assert metrics["reward/mean"] == 0.25 and metrics["reward/sampled_mean"] == 3 / 24


def test_refills_are_bounded_and_dropped_groups_then_fill_the_batch_with_advantage_zero():
    batch, metrics = run(values=only(0), dynamic=True, max_refills=2)
    assert [record.prompt_id for record in batch.records[::4]] == ["p0", "p1", "p2"]
    assert {s.advantage for s in batch.sequences[4:]} == {0.0}
    assert all(s.length > 0 for s in batch.sequences), "they count in B'"
    assert metrics["rollout/refills"] == 2 and metrics["rollout/dropped_groups"] == 4


def test_a_list_that_has_no_more_prompts_ends_the_refills():
    batch, metrics = run(values=only(0), dynamic=True, max_refills=99)
    assert metrics["rollout/refills"] == 5  # 12 prompts: 3, then 2 at a time, and 1
    assert len(batch.records) == 12


def test_a_failed_prompt_loses_none_of_the_others_under_dynamic_sampling():
    batch, _ = run(FakeSampler(drop={"p0", "p3"}), values=only(1, 4, 6), dynamic=True)
    assert [record.prompt_id for record in batch.records[::4]] == ["p6", "p1", "p4"]


@pytest.mark.parametrize(("length", "expected"), [(6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (11, -1.0)])
def test_the_soft_penalty_is_dapos_by_hand(length, expected):
    assert Overlong("penalty", 4).penalty(length, 10) == expected
    assert Overlong("penalty", 4, factor=2.0).penalty(length, 10) == 2 * expected
    assert Overlong("keep", 4).penalty(length, 10) == 0.0


def test_a_penalty_changes_advantages_but_not_the_score():
    # Lengths 2, 3, 4, 5 at a limit of 8; a buffer of 5 takes 0, 0, 1/5 and 2/5.
    batch, metrics = run(overlong=Overlong("penalty", 5))
    rewards = [1.0, 0.0, -0.2, -0.4]
    assert [record.reward for record in batch.records[:4]] == pytest.approx(rewards)
    mean = sum(rewards) / 4
    std = (sum((r - mean) ** 2 for r in rewards) / 4) ** 0.5
    assert [s.advantage for s in batch.sequences[:4]] == pytest.approx([(r - mean) / std for r in rewards])
    assert metrics["reward/mean"] == 0.25 and metrics["reward/length_penalty"] == pytest.approx(-0.15)


def test_groups_that_differ_in_length_alone_still_teach_nothing():
    _, metrics = run(values=only(0, 1), dynamic=True, overlong=Overlong("penalty", 5))
    assert metrics["rollout/dropped_groups"] > 0, "DAPO filters on the verdict, not on the shaped reward"


def test_a_masked_truncated_response_is_not_trained_but_its_reward_counts_in_the_group():
    plain, masked = run()[0], run(overlong=Overlong("mask"))[0]
    assert [s.length for s in masked.sequences[:4]] == [2, 3, 4, 0]
    assert [s.advantage for s in masked.sequences] == [s.advantage for s in plain.sequences]
    (update,) = mini_batches(masked, 3, mean="response", seed=(1,))
    shares = dict(zip(update.indices, update.loss_share, strict=True))
    assert shares[3] == 0.0 and shares[0] == pytest.approx(1 / (2 * 9)), "B' is 9 of the 12 responses"


class ToolSampler(FakeSampler):
    """Every response is written, answered by a tool (two tokens in the middle), and written on."""

    def _rollout(self, prompt, sample):
        mask = torch.tensor([True, False, False, True, True])
        logprobs = torch.tensor([-1.0, 9.0, float("nan"), -2.0, -3.0])
        return Rollout(torch.arange(5), logprobs, "stop", sample, seed=sample, version=0, trained=mask)


def test_tool_tokens_are_read_but_neither_trained_nor_counted_in_t():
    batch, metrics = run(ToolSampler(), values=lambda item: 1.0)
    sequence = batch.sequences[0]
    assert sequence.ids.tolist() == [1, 2, 3, 0, 1, 2, 3, 4] and sequence.length == 3
    assert sequence.rollout_logprobs.tolist() == [0.0, 0.0, 0.0, -1.0, 0.0, 0.0, -2.0, -3.0]
    assert metrics["response/length_mean"] == 5.0
    (update,) = mini_batches(batch, 3, mean="response", seed=(1,))
    packed = pack(flatten(update), [0], Layout(10**6), lambda n: torch.arange(int(2 * n.sum())))
    assert packed.position[packed.response_mask].tolist() == [1, 2, 3]
    assert packed.length[packed.response_mask].tolist() == [3, 3, 3]
    assert packed.tokens[:8].tolist() == update.sequences[0].ids.tolist()


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


def test_routes_stand_at_every_token_and_are_stored_with_the_batch(tmp_path):
    class RoutedSampler(FakeSampler):
        def _rollout(self, prompt, sample):
            plain = super()._rollout(prompt, sample)
            rows = len(prompt.token_ids) + len(plain.response_ids) - 1
            return replace(plain, routes=torch.arange(rows * 4, dtype=torch.int16).view(rows, 2, 2) + sample)

    batch, _ = run(RoutedSampler())
    third = batch.sequences[2]
    assert third.routes[:, 0, 0].tolist() == [2, 6, 10, 14, 18, 22, 22], (
        "nothing looks back at the last token"
    )
    store = RolloutStore(tmp_path)
    store.write(batch)
    store.flush()
    for a, b in zip(store.read(4).sequences, batch.sequences, strict=True):
        assert torch.equal(a.routes, b.routes)


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
