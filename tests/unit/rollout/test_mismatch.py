"""Learner against engine on the same weights and tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pnpo_megatron.algorithm.correction import Correction
from pnpo_megatron.data.batching import corrected, mini_batches
from pnpo_megatron.data.packing import flatten, pack
from pnpo_megatron.data.partition import Layout
from pnpo_megatron.errors import MismatchError
from pnpo_megatron.rollout.mismatch import check_mismatch, correction_metrics, mismatch_metrics
from pnpo_megatron.rollout.probe import advice_for, self_check
from pnpo_megatron.types import RolloutBatch, TrainSequence


def batch_of(old, rollout, mask):
    ids = torch.zeros(len(mask), dtype=torch.int64)
    sequence = TrainSequence(ids, torch.tensor(mask), torch.tensor(rollout), 0.0, torch.tensor(old))
    return RolloutBatch(1, (sequence,), (), (0,))


def test_gaps_of_trained_tokens_by_hand():
    metrics = mismatch_metrics(batch_of([9.0, -1.0, -2.0], [0.0, -1.1, -1.7], [False, True, True]))
    assert metrics == pytest.approx(
        {
            "mismatch/mean": (0.1 - 0.3) / 2,
            "mismatch/mean_abs": 0.2,
            "mismatch/max_abs": 0.3,
            "mismatch/kl": (math.exp(0.1) - 1.1 + math.exp(-0.3) - 0.7) / 2,
            "mismatch/kl_reverse": (
                0.1 * math.exp(0.1) - math.expm1(0.1) - 0.3 * math.exp(-0.3) - math.expm1(-0.3)
            )
            / 2,
            "mismatch/ess_token": (math.exp(0.1) + math.exp(-0.3)) ** 2
            / (2 * (math.exp(0.2) + math.exp(-0.6))),
            "mismatch/ess_sequence": 1.0,
        },
        abs=1e-7,
    )


def test_a_gap_over_the_limit_stops_the_run_and_names_the_setting():
    check_mismatch({"mismatch/mean_abs": 0.1}, 0.1, "step 3")
    with pytest.raises(MismatchError, match=r"step 3: .* 0.2 nats .*\n?.*rollout.max_mismatch = 0.1"):
        check_mismatch({"mismatch/mean_abs": 0.2}, 0.1, "step 3")


def test_a_gap_that_is_not_a_number_stops_the_run():
    with pytest.raises(MismatchError):
        check_mismatch({"mismatch/mean_abs": math.nan}, 0.1, "step 3")


def test_nothing_trained_is_no_mismatch():
    metrics = mismatch_metrics(batch_of([0.0], [0.0], [False]))
    assert {value for key, value in metrics.items() if "ess" not in key} == {0.0}
    assert metrics["mismatch/ess_token"] == metrics["mismatch/ess_sequence"] == 1.0


def test_responses_weigh_by_the_product_of_their_tokens():
    one = batch_of([0.0, 0.2, 0.3], [0.0, 0.0, 0.0], [False, True, True])
    two = batch_of([0.0, -40.0, -900.0], [0.0, 0.0, 0.0], [False, True, True])
    both = RolloutBatch(1, one.sequences + two.sequences, (), (0, 1))
    assert mismatch_metrics(both)["mismatch/ess_sequence"] == pytest.approx(0.5), "one of two is left"


GAPS = torch.log(torch.tensor([1.0, 0.6, 3.0, 0.25, 1.5]))
MASK = torch.tensor([False, True, True, True, True])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("token", 2.0), [1.0, 0.6, 2.0, 0.25, 1.5]),
        (("token", 2.0, True), [1.0, 0.6, 0.0, 0.0, 1.5]),
        (("sequence", 2.0), [1.0, *[0.675] * 4]),
        (("sequence", 1.4, True), [1.0, *[0.0] * 4]),
    ],
)
def test_corrections_by_hand(settings, expected):
    found = Correction(*settings).factors(GAPS - 2.0, torch.full((5,), -2.0), MASK)
    assert found.tolist() == pytest.approx(expected, rel=1e-6) and found.dtype == torch.float32


def test_a_correction_looks_at_nothing_off_the_mask_and_never_overflows():
    old = torch.tensor([float("nan"), -1.0, 3e4])
    found = Correction("sequence", 5.0).factors(old, torch.zeros(3), torch.tensor([False, True, True]))
    assert found.tolist() == [1.0, 5.0, 5.0]


def test_limited_tokens_are_counted():
    batch = batch_of((GAPS - 2.0).tolist(), [-2.0] * 5, MASK.tolist())
    metrics = correction_metrics(batch, Correction("token", 2.0))
    assert metrics["correction/limited_fraction"] == 0.25 and metrics["correction/max"] == 2.0
    assert correction_metrics(batch, Correction("token", 2.0, True))["correction/limited_fraction"] == 0.5


def test_a_corrected_batch_packs_to_advantages_times_the_factors():
    batch = corrected(batch_of((GAPS - 2.0).tolist(), [-2.0] * 5, MASK.tolist()), Correction("token", 2.0))
    batch = replace(batch, sequences=(replace(batch.sequences[0], advantage=-3.0),))
    (update,) = mini_batches(batch, 1, mean="response", seed=(1,))
    packed = pack(flatten(update), [0], Layout(100), lambda n: torch.arange(int(2 * n.sum())))
    assert packed.advantages[packed.response_mask].tolist() == pytest.approx([-1.8, -6.0, -0.75, -4.5])


def test_the_self_check_warns_of_a_bias_that_eats_the_gate_and_says_what_fits():
    mask = [False] + [True] * 64
    noise = [1e-5 * (-1) ** i for i in range(65)]
    biased = batch_of([3e-4 + one for one in noise], [0.0] * 65, mask)
    advice = advice_for(3e-4, dtype="bfloat16", graphs=True, scaled_rope=False, old_logprobs="rollout")
    text = self_check(biased, 7e-4, advice)
    assert text.startswith("warning: self-check: learner - engine = +0.0003") and "43 % of the gate" in text
    assert 'model.dtype = "float32"' in text and "enforce_eager" in text and '"learner"' in text
    assert "rope" not in text, "rounding explains it"
    calm = self_check(batch_of(noise, [0.0] * 65, mask), 7e-4, advice)
    assert calm.startswith("self-check") and "float32" not in calm
    other = advice_for(0.3, dtype="float32", graphs=False, scaled_rope=True, old_logprobs="learner")
    assert len(other) == 1 and "scaled rope" in other[0] and "data.template" in other[0]
