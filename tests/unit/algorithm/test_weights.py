import math
from functools import partial

import pytest
import torch
from naive_reference import LOG_RATIOS, random_responses

from pnpo_megatron.algorithm import make_objective, padded_ratio_stats, resolve_weight
from pnpo_megatron.algorithm.weights import WEIGHTS, tempered_prefix
from pnpo_megatron.errors import ConfigError


def _stats(log_ratios):
    token = torch.tensor([log_ratios], dtype=torch.float64)
    return padded_ratio_stats(token, torch.zeros_like(token), torch.ones_like(token) > 0)


def test_the_reference_vector_gives_the_reference_weights():
    """TRAPS reference vector."""
    stats = _stats(LOG_RATIOS)
    expected = torch.tensor([1.22140276, 1.05127110, 1.05127110, 1.04081077, 1.02429032], dtype=torch.float64)
    torch.testing.assert_close(WEIGHTS["prefix"](stats).exp()[0], expected, rtol=0, atol=6e-9)
    assert float(WEIGHTS["sequence"](stats).exp()) == pytest.approx(1.02429032, abs=6e-9)


def test_minpro_by_hand():
    assert WEIGHTS["minpro"](_stats(LOG_RATIOS))[0].tolist() == pytest.approx([0.2, 0.1, -0.05, -0.09, -0.14])


def test_the_prefix_weight_starts_at_the_token_ratio_and_ends_at_the_sequence_ratio():
    policy, old, mask = random_responses(20, 40)
    stats = padded_ratio_stats(policy, old, mask)
    prefix, token = WEIGHTS["prefix"](stats), WEIGHTS["token"](stats)
    sequence = WEIGHTS["sequence"](stats).expand_as(prefix)
    first, last = mask & (stats.position == 1), mask & (stats.position == stats.length)
    assert first.sum() == last.sum() == 20
    torch.testing.assert_close(prefix[first], token[first], rtol=0, atol=1e-11)
    assert torch.equal(prefix[last], sequence[last])


@pytest.mark.parametrize("name", ["token", "cumulative", "prefix", "minpro"])
def test_a_changed_suffix_leaves_earlier_weights_alone(name):
    policy, old, mask = random_responses(3, 30)
    changed = policy.clone()
    changed[:, 20:] += 1.0
    before = WEIGHTS[name](padded_ratio_stats(policy, old, mask))
    after = WEIGHTS[name](padded_ratio_stats(changed, old, mask))
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_the_sequence_weight_does_depend_on_the_suffix():
    policy, old, mask = random_responses(3, 30)
    changed = policy.clone()
    changed[:, 20:] += 1.0
    before, after = (WEIGHTS["sequence"](padded_ratio_stats(x, old, mask)) for x in (policy, changed))
    assert bool((before != after).all())


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_equal_policies_have_weight_exactly_one(name):
    _, old, mask = random_responses(4, 25, dtype=torch.float32)
    log_weight = make_objective("pnpo", weight=name).log_weight(padded_ratio_stats(old, old, mask))
    assert log_weight.dtype == torch.float32
    assert torch.equal(log_weight, torch.zeros_like(log_weight))


def test_tempering_joins_the_cumulative_and_the_prefix_weight():
    policy, old, mask = random_responses(3, 30)
    stats = padded_ratio_stats(policy, old, mask)
    assert torch.equal(tempered_prefix(stats, alpha=0.0), WEIGHTS["cumulative"](stats))
    assert torch.equal(tempered_prefix(stats, alpha=1.0), WEIGHTS["prefix"](stats))
    half = partial(tempered_prefix, alpha=0.5)
    torch.testing.assert_close(half(stats), stats.prefix_sum / stats.position.double().sqrt())
    assert make_objective("pnpo", weight=half).weight is half
    with pytest.raises(ConfigError, match=r"alpha = 2.*\[0, 1\]"):
        make_objective("pnpo", weight="tempered", alpha=2.0)


def test_a_weight_of_ones_own_comes_in_by_import_path(tmp_path, monkeypatch):
    source = "def damped(stats):\n    return 0.5 * stats.token\n\nlevel = 3\n"
    (tmp_path / "weights_of_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    stats = _stats(LOG_RATIOS)
    objective = make_objective("pnpo", weight="weights_of_a_test:damped")
    assert torch.equal(objective.log_weight(stats), 0.5 * stats.token)
    with pytest.raises(ConfigError, match="int, not a function"):
        resolve_weight("weights_of_a_test:level")
    with pytest.raises(ConfigError, match="cannot be imported.*PYTHONPATH"):
        resolve_weight("weights_of_a_test:dampened")


@pytest.mark.parametrize("name", ["prefixx", "", ":", "nowhere_to_be_found:", "prefix:"])
def test_a_name_that_is_no_weight_lists_the_names(name):
    with pytest.raises(ConfigError, match='token, cumulative, prefix, sequence, minpro.*"module:function"'):
        resolve_weight(name)


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="nowhere_to_be_found"):
        resolve_weight("nowhere_to_be_found:weight")


def test_no_prefix_weight_overflows_at_full_length_with_drift():
    token = torch.full((1, 15_360), 0.05)
    stats = padded_ratio_stats(token, torch.zeros_like(token), torch.ones_like(token) > 0)
    weights = WEIGHTS["prefix"](stats).exp()
    torch.testing.assert_close(weights, torch.full_like(weights, math.exp(0.05)), rtol=1e-7, atol=0)
