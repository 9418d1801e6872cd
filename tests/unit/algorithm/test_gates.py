import math

import numpy as np
import pytest
import torch
from naive_reference import LOG_RATIOS

from pnpo_megatron.algorithm import make_objective, padded_ratio_stats, token_terms

FAR_FROM_A_BOUND = 1e-6


def _judge(objective, log_ratios, advantage=1.0, dtype=torch.float64):
    token = torch.tensor([log_ratios], dtype=dtype)
    stats = padded_ratio_stats(token, torch.zeros_like(token), torch.ones_like(token) > 0)
    return token_terms(objective, stats, torch.full((1, 1), advantage, dtype=dtype))


def _decisions(terms):
    marks = torch.where(terms.below, -1, 0) + torch.where(terms.above, 1, 0)
    assert torch.equal(terms.keep, marks == 0)
    return marks[0].tolist()


def test_the_reference_vector_gives_the_reference_gate():
    """TRAPS reference vector: h = 2.236, 1.581, 1.291, 1.118, 1 and tolerances of 0.05."""
    assert _decisions(_judge(make_objective("pnpo", gate_low=0.05, gate_high=0.05), LOG_RATIOS)) == [
        1,
        0,
        0,
        0,
        0,
    ]
    flat = make_objective("pnpo", gate="flat", gate_low=0.05, gate_high=0.05)
    assert _decisions(_judge(flat, LOG_RATIOS)) == [1, 1, 1, 0, 0]
    assert _decisions(_judge(make_objective("pnpo", gate="none"), LOG_RATIOS)) == [0] * 5


@pytest.mark.parametrize(("length", "t"), [(1, 1), (4, 1), (4, 2), (4, 4), (15_360, 15_360), (15_360, 60)])
def test_the_band_is_decided_at_its_own_width_on_both_sides(length, t):
    """Just inside is kept and just outside rejected, at the position's own bound; asymmetric tolerances."""
    low, high = 7e-4, 9.5e-4
    scale = math.sqrt(length / t)
    for bound in (-low * scale, high * scale):
        for nudge, expected in ((1 - 1e-5, 0), (1 + 1e-5, -1 if bound < 0 else 1)):
            log_weight = math.log1p(bound * nudge)
            log_ratios = torch.zeros(1, length, dtype=torch.float64)
            log_ratios[0, t - 1] = log_weight * t
            terms = _judge(make_objective("pnpo"), log_ratios[0].tolist())
            assert _decisions(terms)[t - 1] == expected, (bound, nudge)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_are_inclusive(dtype):
    """The tolerance is read off the weight itself, so that it lies exactly on the bound."""
    for log_ratio in (0.125, -0.125):
        on_bound = abs(float(torch.tensor(log_ratio, dtype=dtype).expm1()))
        for gate in ({"gate": "flat"}, {"gate": "sqrt"}):
            exact = make_objective("pnpo", gate_low=on_bound, gate_high=on_bound, **gate)
            tight = make_objective("pnpo", gate_low=on_bound * 0.999, gate_high=on_bound * 0.999, **gate)
            assert _decisions(_judge(exact, [log_ratio], dtype=dtype)) == [0]
            assert _decisions(_judge(tight, [log_ratio], dtype=dtype)) == [1 if log_ratio > 0 else -1]
        clip = make_objective("grpo", clip_low=on_bound, clip_high=on_bound)
        assert _decisions(_judge(clip, [log_ratio], advantage=log_ratio, dtype=dtype)) == [0]


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_the_band_does_not_look_at_the_advantage(advantage):
    objective = make_objective("pnpo", gate_low=0.05, gate_high=0.05)
    assert _decisions(_judge(objective, LOG_RATIOS, advantage)) == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [(1.0, [0, 0, 0, 1, 1]), (-1.0, [-1, 0, 0, 0, 1]), (0.0, [0, 0, 0, 0, 0])],
)
def test_clipping_is_one_sided_and_dual_clip_closes_the_other_side(advantage, expected):
    log_ratios = [math.log(w) for w in (0.5, 0.9, 1.1, 2.0, 11.0)]
    assert _decisions(_judge(make_objective("grpo"), log_ratios, advantage)) == expected


def test_without_dual_clip_a_large_weight_with_negative_advantage_is_kept():
    objective = make_objective("gspo", weight="token")
    assert _decisions(_judge(objective, [math.log(50.0)], -1.0)) == [0]


@pytest.mark.parametrize("gate", ["sqrt", "flat", "clip", "none"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_overflowed_weight_is_rejected_high_by_every_gate(gate, advantage, dtype):
    needed = {"sqrt": ("gate_low", "gate_high"), "flat": ("gate_low", "gate_high")}
    keys = needed.get(gate, ("clip_low", "clip_high") if gate == "clip" else ())
    objective = make_objective("gspo", weight="cumulative", gate=gate, **dict.fromkeys(keys, 0.1))
    terms = _judge(objective, [0.0, 400.0, 400.0, 0.0], advantage, dtype)
    assert bool(terms.weight[0, 2:].isinf().all())
    assert _decisions(terms)[2:] == [1, 1]


@pytest.mark.parametrize("gate", ["sqrt", "clip"])
def test_a_nan_weight_is_never_called_rejected(gate):
    objective = make_objective("pnpo" if gate == "sqrt" else "gspo")
    terms = _judge(objective, [0.0, math.nan, 0.0])
    assert bool(terms.keep[0, 1:].all())


def test_a_reference_length_replaces_the_response_length():
    plain = make_objective("pnpo", gate_low=0.05, gate_high=0.05)
    longer = make_objective("pnpo", gate_low=0.05, gate_high=0.05, gate_reference_length=5)
    shorter = make_objective("pnpo", gate_low=0.05, gate_high=0.05, gate_reference_length=1)
    assert _decisions(_judge(longer, LOG_RATIOS)) == _decisions(_judge(plain, LOG_RATIOS))
    # h = sqrt(1/t) = 1, 0.707, 0.577, 0.5, 0.447, so the bounds are 0.05, 0.035, 0.029, 0.025, 0.022.
    assert _decisions(_judge(shorter, LOG_RATIOS)) == [1, 1, 1, 1, 1]
    assert _decisions(_judge(shorter, [0.04, -0.02, 0.0, 0.0, 0.0])) == [0, 0, 0, 0, 0]


def test_h16_gate_decisions_on_fifteen_thousand_steps_are_those_of_float64():
    rng = np.random.default_rng(3)
    old = rng.normal(-1.5, 0.4, 15_360).astype(np.float32)
    policy = (old + rng.normal(0.0, 0.05, 15_360)).astype(np.float32)
    position = np.arange(1, 15_361)
    excess = np.expm1(np.cumsum(policy.astype(np.float64) - old) / position)
    lower, upper = -7e-4 * np.sqrt(15_360 / position), 9.5e-4 * np.sqrt(15_360 / position)
    expected = torch.from_numpy((excess >= lower) & (excess <= upper))
    stats = padded_ratio_stats(
        torch.from_numpy(policy)[None], torch.from_numpy(old)[None], torch.ones(1, 15_360) > 0
    )
    terms = token_terms(make_objective("pnpo"), stats, torch.ones(1, 1))
    assert terms.weight.dtype == terms.log_weight.dtype == torch.float32
    near = np.minimum(np.abs(excess - lower), np.abs(excess - upper)) < FAR_FROM_A_BOUND
    differs = terms.keep[0] != expected
    assert 0 < expected.sum() < 15_360
    assert not bool((differs & ~torch.from_numpy(near)).any())


def test_h16_in_bfloat16_the_same_gate_could_not_reject_anything_at_the_end():
    """Why log-weights are float32: every weight near 1 is 1 there."""
    assert float(torch.tensor(1.00095, dtype=torch.bfloat16)) == 1.0
    log_ratios = [0.0] * 63 + [64 * math.log1p(9.6e-4)]
    assert _decisions(_judge(make_objective("pnpo"), log_ratios, dtype=torch.float32))[-1] == 1
