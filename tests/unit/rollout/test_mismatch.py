"""Learner against engine on the same weights and tokens."""

from __future__ import annotations

import math

import pytest
import torch

from pnpo_megatron.errors import MismatchError
from pnpo_megatron.rollout.mismatch import check_mismatch, mismatch_metrics
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
    assert set(mismatch_metrics(batch_of([0.0], [0.0], [False])).values()) == {0.0}
