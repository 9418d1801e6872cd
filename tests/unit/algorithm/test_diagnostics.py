import math

import pytest
import torch
from naive_reference import LOG_RATIOS, random_responses

from pnpo_megatron.algorithm import loss_shares, make_objective, packed_ratio_stats, policy_loss
from pnpo_megatron.algorithm.diagnostics import (
    BIN_SUMS,
    BINS,
    SUMS,
    add_tallies,
    skip_reason,
    summarise,
    tally,
)


def _tally(policy, old, mask, advantages, *, entropy=None, objective=None, share=None):
    """The tally of rows [B, T] packed one after the other."""
    rows, width = policy.shape
    objective = objective or make_objective("pnpo", gate_low=0.05, gate_high=0.05)
    share = loss_shares(mask.sum(-1), objective.mean) if share is None else share
    stats = packed_ratio_stats(
        policy.flatten(), old.flatten(), mask.flatten(), torch.arange(0, rows * width + 1, width)
    )
    spread = [torch.where(mask, x[:, None].to(policy.dtype), 0.0).flatten() for x in (advantages, share)]
    loss, terms = policy_loss(objective, policy.flatten(), stats, *spread)
    return tally(
        loss, stats, terms, mask=mask.flatten(), advantages=spread[0],
        entropy=(torch.zeros_like(policy) if entropy is None else entropy).flatten(),
    )  # fmt: skip


def test_metrics_of_the_reference_vector_by_hand():
    policy, old = torch.tensor([LOG_RATIOS], dtype=torch.float64), torch.zeros(1, 5, dtype=torch.float64)
    entropy = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]], dtype=torch.float64)
    mask = torch.ones(1, 5) > 0
    total = _tally(policy, old, mask, torch.ones(1), entropy=entropy)
    metrics = summarise(total)
    weights = [1.22140276, 1.05127110, 1.05127110, 1.04081077, 1.02429032]
    expected = {
        "entropy": 3.0,
        "gate/rejected_fraction": 0.2,
        "gate/rejected_fraction_low": 0.0,
        "gate/rejected_fraction_high": 0.2,
        "weight/mean": sum(weights) / 5,
        "weight/min": 1.02429032,
        "weight/max": 1.22140276,
        "log_ratio/mean": 0.024,
        "log_ratio/std": math.sqrt(sum((x - 0.024) ** 2 for x in LOG_RATIOS) / 5),
        "tokens/valid": 5.0,
        "tokens/not_finite": 0.0,
        "loss": -sum(w * x for w, x in zip(weights[1:], LOG_RATIOS[1:], strict=True)) / 5,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=6e-9), name
    bins = [metrics[f"gate/rejected_fraction_bin_{index}"] for index in range(10)]
    assert bins == [1.0] + [0.0] * 9
    assert skip_reason(total) == ""


def test_position_bins_are_tenths_of_the_own_response():
    lengths = [1, 2, 10, 37]
    policy = torch.zeros(4, 40)
    mask = torch.arange(40)[None] < torch.tensor(lengths)[:, None]
    total = _tally(policy, policy, mask, torch.ones(4))
    counts = [0] * 10
    for length in lengths:
        for t in range(1, length + 1):
            counts[min(9, 10 * (t - 1) // length)] += 1
    valid = len(SUMS) + BINS * BIN_SUMS.index("valid")
    assert total.sums[valid : valid + BINS].tolist() == counts
    assert sum(counts) == sum(lengths)


def test_low_and_high_add_up_to_the_rejected_fraction():
    policy, old, mask = random_responses(20, 30, scale=0.2)
    metrics = summarise(_tally(policy, old, mask, torch.randn(20)))
    low, high = metrics["gate/rejected_fraction_low"], metrics["gate/rejected_fraction_high"]
    assert low > 0 and high > 0
    assert metrics["gate/rejected_fraction"] == pytest.approx(low + high)


@pytest.mark.parametrize("pieces", [2, 3, 6])
def test_micro_batches_in_any_order_give_the_metrics_of_the_whole(pieces):
    policy, old, mask = random_responses(6, 30)
    mask[4] = False
    advantages, entropy = torch.randn(6, dtype=torch.float64), torch.rand(6, 30, dtype=torch.float64)
    share = loss_shares(mask.sum(-1), "response")

    def part(rows):
        tensors = (policy[rows], old[rows], mask[rows], advantages[rows])
        return _tally(*tensors, entropy=entropy[rows], share=share[rows])

    whole = summarise(part(torch.arange(6)))
    joined = summarise(add_tallies(part(rows) for rows in torch.randperm(6).tensor_split(pieces)))
    assert joined.keys() == whole.keys()
    for name, value in whole.items():
        assert joined[name] == pytest.approx(value, rel=1e-12, abs=1e-15), name


def test_nothing_off_the_mask_reaches_a_metric():
    policy, old, mask = random_responses(5, 20)
    entropy = torch.rand(5, 20, dtype=torch.float64)
    clean = _tally(policy, old, mask, torch.ones(5), entropy=entropy)
    dirty = [values.masked_fill(~mask, math.nan) for values in (policy, old, entropy)]
    soiled = _tally(dirty[0], dirty[1], mask, torch.ones(5), entropy=dirty[2])
    assert torch.equal(clean.sums, soiled.sums) and torch.equal(clean.maxima, soiled.maxima)


def test_entropy_may_come_for_the_trained_tokens_alone():
    policy, old, mask = random_responses(5, 20)
    entropy = torch.rand(5, 20, dtype=torch.float64)
    whole = summarise(_tally(policy, old, mask, torch.ones(5), entropy=entropy))
    alone = summarise(_tally(policy, old, mask, torch.ones(5), entropy=entropy[mask]))
    assert alone["entropy"] == pytest.approx(whole["entropy"], rel=1e-12)


def test_a_value_that_is_not_finite_is_counted_and_spoils_no_mean():
    policy, old = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    policy[0, 2] = math.nan
    total = _tally(policy, old, torch.ones(2, 4) > 0, torch.ones(2))
    metrics = summarise(total)
    assert math.isnan(metrics["loss"]) and skip_reason(total) == "loss is not finite"
    assert metrics["tokens/not_finite"] == 2.0
    assert metrics["weight/mean"] == 1.0 and metrics["gate/rejected_fraction"] == 0.0


def test_an_overflowed_weight_is_rejected_high_and_spoils_no_mean():
    policy = torch.tensor([[0.0, 800.0, 0.0]], dtype=torch.float64)
    total = _tally(
        policy, policy * 0, torch.ones(1, 3) > 0, torch.ones(1), objective=make_objective("cumulative")
    )
    metrics = summarise(total)
    assert metrics["gate/rejected_fraction_high"] == pytest.approx(2 / 3)
    assert metrics["weight/mean"] == metrics["weight/max"] == 1.0 and math.isfinite(metrics["loss"])


@pytest.mark.parametrize(
    ("log_ratio", "valid", "advantage", "reason"),
    [
        (0.0, False, 1.0, "no valid token"),
        (0.0, True, 0.0, "every advantage is 0"),
        (5.0, True, 1.0, "every token with an advantage is rejected"),
        (0.0, True, 1.0, ""),
    ],
)
def test_an_update_that_would_only_move_momentum_has_a_reason_to_be_skipped(
    log_ratio, valid, advantage, reason
):
    policy = torch.tensor([[log_ratio], [0.0]]).repeat(1, 3)  # the second row is kept, but has no advantage
    mask = torch.full((2, 3), valid)
    total = _tally(policy, policy * 0, mask, torch.tensor([advantage, 0.0]))
    assert skip_reason(total) == reason
    assert all(math.isfinite(value) for value in summarise(total).values())


def test_no_tally_at_all_is_no_token():
    total = add_tallies([])
    assert skip_reason(total) == "no valid token"
    assert set(summarise(total).values()) == {0.0}
