import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_reference import LOG_RATIOS, naive_log_weights, random_responses

from pnpo_megatron.algorithm import packed_ratio_stats, padded_ratio_stats
from pnpo_megatron.algorithm.fixed_point import GRID_NATS, to_grid
from pnpo_megatron.algorithm.weights import WEIGHTS

FIELDS = ("token", "prefix_sum", "response_sum", "preceding_min", "position", "length")


def _one(log_ratios, mask=None):
    """Stats of a single response whose old log-probs are 0."""
    token = torch.as_tensor(log_ratios, dtype=torch.float32)[None]
    mask = torch.ones_like(token, dtype=torch.bool) if mask is None else torch.as_tensor(mask)[None]
    return padded_ratio_stats(token, torch.zeros_like(token), mask)


def _valid(stats, mask):
    """Every field on the mask alone, in order."""
    return {name: getattr(stats, name).expand_as(stats.token)[mask] for name in FIELDS}


def test_masked_tokens_do_not_advance_the_position_and_add_nothing():
    mask = [False, False, True, True, False, True]
    stats = _one([9.0, 9.0, 0.25, -0.5, 9.0, 1.0], mask)
    assert stats.position[0][mask].tolist() == [1, 2, 3]
    assert stats.length.item() == 3
    assert stats.prefix_sum[0][mask].tolist() == [0.25, -0.25, 0.75]
    assert stats.response_sum.item() == 0.75
    assert stats.preceding_min[0][mask].tolist() == [0.0, 0.25, -0.5]


def test_left_padding_is_not_counted_as_positions():
    """TRAPS reference vector: two counted padding columns give 1.06893911 and so on instead."""
    padded = _one([7.0, 7.0, *LOG_RATIOS], [False, False, True, True, True, True, True])
    weights = WEIGHTS["prefix"](padded).exp()[0, 2:]
    expected = torch.tensor([1.22140276, 1.05127110, 1.05127110, 1.04081077, 1.02429032], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-8)


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_every_rung_equals_its_formula_written_out(name):
    policy, old, mask = random_responses(5, 23)
    computed = WEIGHTS[name](padded_ratio_stats(policy, old, mask)).expand(5, 23)
    for row in range(5):
        expected = naive_log_weights(name, (policy - old)[row][mask[row]].tolist())
        torch.testing.assert_close(
            computed[row][mask[row]], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=23 * GRID_NATS
        )


def test_packed_equals_padded_bitwise():
    policy, old, mask = random_responses(6, 19, dtype=torch.float32)
    padded = _valid(padded_ratio_stats(policy, old, mask), mask)
    cu_seqlens = torch.arange(0, 6 * 19 + 1, 19)
    packed = packed_ratio_stats(policy.flatten(), old.flatten(), mask.flatten(), cu_seqlens)
    for name, value in _valid(packed, mask.flatten()).items():
        assert torch.equal(value, padded[name]), name


def test_packing_takes_sequences_without_any_token():
    policy, old, mask = (values[0] for values in random_responses(1, 6))
    alone = packed_ratio_stats(policy, old, mask, torch.tensor([0, 6]))
    with_empty = packed_ratio_stats(policy, old, mask, torch.tensor([0, 0, 6, 6]))
    for name in FIELDS:
        assert torch.equal(getattr(alone, name), getattr(with_empty, name)), name


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_permuting_packing_and_padding_leave_every_weight_bitwise_alone(data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    seed = data.draw(st.integers(0, 2**20))
    order = data.draw(st.permutations(range(len(lengths))))
    width = max(lengths) + data.draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(2, length, generator=generator) for length in lengths]

    expected = [
        packed_ratio_stats(*row, torch.ones(row.shape[1]) > 0, torch.tensor([0, row.shape[1]]))
        for row in rows
    ]
    packed = torch.cat([rows[i] for i in order], dim=1)
    ends = torch.tensor([0, *[lengths[i] for i in order]]).cumsum(0)
    from_packed = packed_ratio_stats(*packed, torch.ones(packed.shape[1]) > 0, ends)
    padded, mask = torch.full((2, len(rows), width), math.nan), torch.zeros(len(rows), width) > 0
    for place, i in enumerate(order):
        start = data.draw(st.integers(0, width - lengths[i]))
        padded[:, place, start : start + lengths[i]] = rows[i]
        mask[place, start : start + lengths[i]] = True
    from_padded = padded_ratio_stats(*padded, mask)

    for name, weight in WEIGHTS.items():
        wanted = torch.cat([weight(expected[i]) for i in order])
        assert torch.equal(weight(from_packed), wanted), name
        assert torch.equal(weight(from_padded).expand_as(mask)[mask], wanted), name


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_prefix_sum_is_the_same_number_however_the_sequence_is_cut_and_added(data):
    length = data.draw(st.integers(1, 400))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    drift, scale = data.draw(st.sampled_from([(0.0, 0.05), (0.05, 0.05), (-3.0, 2.0), (100.0, 60.0)]))
    token = drift + scale * torch.randn(1, length, generator=generator)
    whole = padded_ratio_stats(token, torch.zeros_like(token), torch.ones_like(token) > 0).prefix_sum[0]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=5)))
    pieces = torch.tensor_split(to_grid(token[0]), cuts)
    sums = [piece.flip(0).sum() for piece in pieces]
    at = data.draw(st.integers(0, len(pieces) - 1))
    before = sum(
        (sums[i] for i in data.draw(st.permutations(range(at)))), torch.zeros((), dtype=torch.float64)
    )
    joined = before + pieces[at].cumsum(0)
    start = sum(len(piece) for piece in pieces[:at])
    assert torch.equal(whole[start : start + len(joined)], joined)


def test_plain_float_sums_do_depend_on_the_cut():
    """What the grid is for: the same property fails for sums of the raw values."""
    token = torch.randn(15_360, dtype=torch.float64) * 0.05
    chunks = token.view(8, -1)
    backwards = sum(chunk.flip(0).sum() for chunk in chunks.flip(0))
    assert token.cumsum(0)[-1] != backwards
    on_grid = to_grid(token)
    assert on_grid.cumsum(0)[-1] == sum(chunk.flip(0).sum() for chunk in on_grid.view(8, -1).flip(0))


def test_the_grid_moves_a_log_ratio_by_at_most_half_a_step():
    token = torch.randn(10_000, dtype=torch.float64)
    assert float((to_grid(token) - token).abs().max()) <= GRID_NATS / 2
    large = torch.tensor([2.0**-13, -0.1, 0.7, 300.0, -1e4])
    assert torch.equal(to_grid(large), large.double())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_its_own_position_and_later_ones_only(bad):
    stats = _one([0.25, 0.5, bad, 0.125, 1.0])
    assert stats.prefix_sum[0, :2].tolist() == [0.25, 0.75]
    assert not bool(stats.prefix_sum[0, 2:].isfinite().any())
    assert not math.isfinite(stats.response_sum.item())


def test_a_nan_stays_in_its_own_sequence():
    policy, old = torch.zeros(8), torch.zeros(8)
    policy[1] = math.nan
    stats = packed_ratio_stats(policy, old, torch.ones(8) > 0, torch.tensor([0, 3, 8]))
    assert torch.equal(stats.prefix_sum[3:], torch.zeros(5, dtype=torch.float64))
    assert torch.equal(stats.preceding_min[3:], torch.zeros(5))
    assert bool(stats.preceding_min[2].isnan()) and not bool(stats.preceding_min[:2].isnan().any())


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, -1e10])
def test_h10_nothing_off_the_mask_is_ever_looked_at(junk):
    policy, old, mask = random_responses(4, 15, dtype=torch.float32)
    clean = _valid(padded_ratio_stats(policy * mask, old * mask, mask), mask)
    dirty = padded_ratio_stats(policy.masked_fill(~mask, junk), old.masked_fill(~mask, -junk), mask)
    for name, value in _valid(dirty, mask).items():
        assert torch.equal(value, clean[name]), name


def test_h16_bfloat16_log_probs_are_widened_before_they_are_subtracted():
    policy = torch.tensor([[-12.34567, -3.0]], dtype=torch.bfloat16)
    old = torch.tensor([[-12.0, -3.001]])
    stats = padded_ratio_stats(policy, old, torch.ones(1, 2) > 0)
    assert stats.token.dtype == torch.float32
    assert stats.prefix_sum.dtype == stats.response_sum.dtype == torch.float64
    assert torch.equal(stats.token, policy.float() - old)


def test_h16_fifteen_thousand_small_steps_add_up_exactly():
    """In bfloat16 the same sum stops at 0.5."""
    stats = _one(torch.full((15_360,), 0.001))
    step = float(torch.tensor(0.001, dtype=torch.float32))
    assert stats.response_sum.item() == pytest.approx(15.36, abs=1e-5)
    assert abs(stats.response_sum.item() - 15_360 * step) <= 15_360 * GRID_NATS / 2


def test_the_prefix_minimum_is_not_computed_unless_asked_for():
    stats = _one([0.5, -0.25, 0.125])
    assert "preceding_min" not in vars(stats)
    assert stats.preceding_min.tolist() == [[0.0, 0.5, -0.25]]
    assert stats.preceding_min is stats.preceding_min


def test_no_statistic_carries_a_gradient():
    policy = torch.zeros(2, 3, requires_grad=True)
    stats = padded_ratio_stats(policy, torch.zeros(2, 3), torch.ones(2, 3) > 0)
    assert not any(getattr(stats, name).requires_grad for name in FIELDS)


def test_shapes_that_do_not_fit_are_errors_that_say_both():
    ones = torch.ones(2, 3) > 0
    with pytest.raises(ValueError, match=r"old_logprobs is \[2, 4\], but policy_logprobs is \[2, 3\]"):
        padded_ratio_stats(torch.zeros(2, 3), torch.zeros(2, 4), ones)
    with pytest.raises(ValueError, match="ends at 5, but 6"):
        packed_ratio_stats(torch.zeros(6), torch.zeros(6), torch.ones(6) > 0, torch.tensor([0, 5]))
