"""The package gives the figures that plain NumPy gives (numbers.json, written by make_numbers.py)."""

import json

import make_numbers
import pytest
import torch

from pnpo_megatron.algorithm import make_objective, padded_ratio_stats, policy_loss_padded, token_terms

NUMBERS = json.loads(make_numbers.NUMBERS.read_text())
LENGTH = make_numbers.LENGTH


def _terms(log_ratio, name="pnpo", **settings):
    """Terms of [B, T] log-ratios with every token valid and advantage 1."""
    old = torch.zeros_like(log_ratio)
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    stats = padded_ratio_stats(log_ratio, old, mask)
    return token_terms(make_objective(name, **settings), stats, torch.ones(len(log_ratio), 1))


def test_the_stored_numbers_are_the_published_ones():
    assert NUMBERS["overflow_index_float32"] == 1843
    assert NUMBERS["overflow_index_float64"] == 14286
    assert NUMBERS["prefix_mean_at_end"] == pytest.approx(1.0510, abs=5e-5)
    assert NUMBERS["kept_fraction"] == pytest.approx(0.360, abs=5e-4)
    assert NUMBERS["coefficient_sum"] == pytest.approx(0.3594, abs=5e-5)
    assert NUMBERS["coefficient_sum_renormalised"] == pytest.approx(0.9985, abs=5e-5)
    assert NUMBERS["scheduled_acceptance_min"] == pytest.approx(0.920, abs=5e-4)
    assert NUMBERS["scheduled_acceptance_max"] == pytest.approx(0.973, abs=5e-4)
    assert NUMBERS["flat_acceptance_first"] == 0.0125
    assert NUMBERS["flat_acceptance_last"] == pytest.approx(0.940, abs=5e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cumulative_weight_overflows_where_numpy_does_and_the_prefix_mean_does_not(dtype):
    drift = torch.from_numpy(make_numbers.single_responses()[0])[None]
    cumulative = _terms(drift.to(dtype), "cumulative")
    first_infinite = int(cumulative.weight.isinf().int().argmax())
    # NumPy multiplied rounded ratios, we add logarithms: the token of the overflow is the same.
    assert first_infinite == NUMBERS[f"overflow_index_{str(dtype).removeprefix('torch.')}"]
    assert bool(cumulative.above[cumulative.weight.isinf()].all())
    prefix = _terms(drift.to(dtype), "pnpo")
    assert float(prefix.weight[0, -1]) == pytest.approx(NUMBERS["prefix_mean_at_end"], rel=1e-6)
    assert bool(prefix.weight.isfinite().all())


def test_kept_share_and_coefficient_sum_of_one_long_response():
    _, old, new = (torch.from_numpy(values) for values in make_numbers.single_responses())
    terms = _terms((new - old)[None])
    policy = new.float()[None].requires_grad_()
    mask = torch.ones(1, LENGTH, dtype=torch.bool)
    policy_loss_padded("pnpo", policy, old[None], torch.ones(1), mask).backward()
    coefficients = -policy.grad
    assert int(terms.keep.sum()) == round(NUMBERS["kept_fraction"] * LENGTH)
    assert float(coefficients.sum()) == pytest.approx(NUMBERS["coefficient_sum"], rel=1e-6)
    renormalised = coefficients.sum() / terms.keep.double().mean()
    assert float(renormalised) == pytest.approx(NUMBERS["coefficient_sum_renormalised"], rel=1e-6)


def test_scheduled_acceptance_is_even_over_positions_and_flat_acceptance_is_not():
    rows = torch.from_numpy(make_numbers.noise_rows())
    scheduled = _terms(rows, gate="sqrt").keep.double().mean(0)
    flat = _terms(rows, gate="flat").keep.double().mean(0)
    assert float(scheduled.min()) == pytest.approx(NUMBERS["scheduled_acceptance_min"], abs=1e-9)
    assert float(scheduled.max()) == pytest.approx(NUMBERS["scheduled_acceptance_max"], abs=1e-9)
    assert float(flat[0]) == NUMBERS["flat_acceptance_first"]
    assert float(flat[-1]) == pytest.approx(NUMBERS["flat_acceptance_last"], abs=1e-9)
