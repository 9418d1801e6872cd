import math

import pytest
import torch
from naive_reference import LOG_RATIOS, naive_pnpo_coefficients, published_clip_loss, random_responses

from pnpo_megatron.algorithm import (
    PRESETS,
    loss_shares,
    make_objective,
    packed_ratio_stats,
    policy_loss,
    policy_loss_padded,
)

RELATIVE = 1e-9
"""float64 against float64; the grid moves a log-ratio by 7e-12."""


def _gradient(loss, policy):
    return torch.autograd.grad(loss, policy)[0]


def _padded(name, policy, old, advantages, mask, **settings):
    """Loss and gradient of `policy_loss_padded`."""
    policy = policy.clone().requires_grad_()
    loss = policy_loss_padded(name, policy, old, advantages, mask, **settings)
    return loss.detach(), _gradient(loss, policy)


def _packed(objective, policy, old, advantages, mask, share=None):
    """Loss and gradient of `policy_loss` on the rows packed one after the other, holes included."""
    rows, width = policy.shape
    policy = policy.clone().requires_grad_()
    share = loss_shares(mask.sum(-1), objective.mean) if share is None else share
    cu_seqlens = torch.arange(0, rows * width + 1, width)
    stats = packed_ratio_stats(policy.flatten(), old.flatten(), mask.flatten(), cu_seqlens)
    spread = [torch.where(mask, x[:, None].to(policy.dtype), 0.0).flatten() for x in (advantages, share)]
    loss, _ = policy_loss(objective, policy.flatten(), stats, *spread)
    return loss.detach(), _gradient(loss, policy)


def _distance(gradient, reference):
    return float((gradient.double() - reference).norm() / reference.norm())


def test_the_reference_vector_gives_the_reference_sum():
    """TRAPS reference vector: sum(gate * w) / L, and not the sum over the accepted count, 1.04191082."""
    policy, old = torch.tensor([LOG_RATIOS]), torch.zeros(1, 5)
    mask = torch.ones(1, 5) > 0
    _, gradient = _padded("pnpo", policy, old, torch.ones(1), mask, gate_low=0.05, gate_high=0.05)
    assert float(-gradient.sum()) == pytest.approx(0.83352866, abs=6e-8)
    assert gradient[0, 0] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pnpo_is_equation_11_written_out(dtype):
    policy, old, mask = random_responses(7, 40, scale=0.02, dtype=dtype)
    advantages = torch.linspace(-1.5, 2.0, 7, dtype=torch.float64)
    low, high = 3e-3, 4e-3
    expected, value = torch.zeros(7, 40, dtype=torch.float64), 0.0
    for row in range(7):
        chosen = mask[row]
        coefficients = naive_pnpo_coefficients(
            (policy.double() - old.double())[row][chosen].tolist(), low, high
        )
        expected[row][chosen] = -torch.tensor(coefficients, dtype=torch.float64) * advantages[row] / 7
        value += float((expected[row][chosen] * policy[row][chosen].double()).sum())
    assert 0 < int((expected != 0).sum()) < int(mask.sum())
    loss, gradient = _padded("pnpo", policy, old, advantages, mask, gate_low=low, gate_high=high)
    tolerance = RELATIVE if dtype == torch.float64 else 5e-6
    assert _distance(gradient, expected) < tolerance
    assert abs(float(loss) - value) < tolerance * float((expected * policy).abs().sum())


@pytest.mark.parametrize("scale", [0.05, 0.5, 3.0])
def test_grpo_has_the_gradient_of_the_published_clip_loss(scale):
    policy, old, mask = random_responses(8, 30, scale=scale)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, 1.5, -0.1, -3.0], dtype=torch.float64)
    for settings in ({}, {"dual_clip": 1.5}, {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 3.0}):
        tolerances = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0} | settings
        reference = policy.clone().requires_grad_()
        published = published_clip_loss(
            "token", reference, old, advantages, mask,
            tolerances["clip_low"], tolerances["clip_high"], tolerances["dual_clip"],
        )  # fmt: skip
        _, gradient = _padded("grpo", policy, old, advantages, mask, **settings)
        assert _distance(gradient, _gradient(published, reference)) < RELATIVE


@pytest.mark.parametrize("scale", [1e-3, 0.05])
def test_gspo_has_the_gradient_of_the_published_clip_loss(scale):
    policy, old, mask = random_responses(8, 30, scale=scale)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, 1.5, -0.1, -3.0], dtype=torch.float64)
    reference = policy.clone().requires_grad_()
    published = published_clip_loss("sequence", reference, old, advantages, mask, 3e-4, 4e-4)
    expected = _gradient(published, reference)
    assert bool(expected.any())
    _, gradient = _padded("gspo", policy, old, advantages, mask)
    assert _distance(gradient, expected) < RELATIVE


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_and_padded_give_bitwise_the_same_gradient(name, dtype):
    policy, old, mask = random_responses(6, 25, scale=0.02, dtype=dtype)
    mask[3] = False
    advantages = torch.randn(6, dtype=dtype)
    settings = {"gate_low": 5e-3, "gate_high": 5e-3} if name == "pnpo" else {}
    loss, gradient = _padded(name, policy, old, advantages, mask, **settings)
    packed_loss, packed_gradient = _packed(make_objective(name, **settings), policy, old, advantages, mask)
    assert torch.equal(packed_gradient, gradient)
    scale = float((gradient * policy).abs().sum())
    assert abs(float(packed_loss - loss)) <= 5e-6 * scale


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("pieces", [1, 2, 3, 9])
def test_h09_micro_batches_of_any_size_and_order_add_up_to_the_whole(name, pieces):
    policy, old, mask = random_responses(9, 25, scale=0.02)
    advantages = torch.randn(9, dtype=torch.float64)
    loss, gradient = _padded(name, policy, old, advantages, mask)
    objective = make_objective(name)
    shares = loss_shares(mask.sum(-1), objective.mean)
    order = torch.randperm(9)
    total, joined = 0.0, torch.zeros_like(gradient)
    for rows in order.tensor_split(pieces):
        part = _packed(objective, policy[rows], old[rows], advantages[rows], mask[rows], shares[rows])
        total += float(part[0])
        joined[rows] = part[1]
    torch.testing.assert_close(joined, gradient, rtol=1e-10, atol=0)
    assert total == pytest.approx(float(loss), abs=1e-10 * float((gradient * policy).abs().sum()))


def test_h09_shares_reproduce_the_published_arithmetic():
    """Token mean over 1 and 9 tokens, losses 1 and 0: 0.1; response mean: 0.5; never the other way round."""
    lengths, losses = torch.tensor([1, 9]), torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert float((loss_shares(lengths, "token") * lengths * losses).sum()) == pytest.approx(0.1)
    assert float((loss_shares(lengths, "response") * lengths * losses).sum()) == pytest.approx(0.5)
    four = torch.tensor([3, 5, 2, 7])
    values = torch.tensor([1.0, 1.0, 1.0, 5.0], dtype=torch.float64)
    assert float((loss_shares(four, "response") * four * values).sum()) == pytest.approx(2.0)


def test_h15_a_masked_response_leaves_numerator_and_denominator():
    lengths = torch.tensor([4, 4, 0])
    assert loss_shares(lengths, "token").tolist() == [1 / 8, 1 / 8, 0.0]
    assert loss_shares(lengths, "response").tolist() == [1 / 8, 1 / 8, 0.0]
    assert loss_shares(torch.tensor([2, 6, 0]), "response").tolist() == [1 / 4, 1 / 12, 0.0]
    assert loss_shares(torch.tensor([0, 0]), "token").tolist() == [0.0, 0.0]
    assert loss_shares(torch.tensor([0, 0]), "response").tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="'sample'"):
        loss_shares(lengths, "sample")


@pytest.mark.parametrize("name", list(PRESETS))
def test_h15_masking_a_truncated_response_equals_leaving_it_out(name):
    policy, old, mask = random_responses(3, 8, scale=1e-3)
    mask[2] = False
    advantages = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    loss, gradient = _padded(name, policy, old, advantages, mask)
    without = _padded(name, policy[:2], old[:2], advantages[:2], mask[:2])
    assert float(loss) == pytest.approx(float(without[0]), rel=1e-12)
    assert torch.equal(gradient[:2], without[1])
    assert torch.equal(gradient[2], torch.zeros(8, dtype=torch.float64))


@pytest.mark.parametrize("name", list(PRESETS))
def test_h10_no_valid_token_at_all_gives_loss_zero_and_gradient_zero(name):
    policy = torch.full((2, 3), math.nan)
    mask = torch.zeros(2, 3) > 0
    for advantages in (torch.ones(2), torch.full((2,), math.nan)):
        loss, gradient = _padded(name, policy, policy, advantages, mask)
        assert loss == 0.0 and torch.equal(gradient, torch.zeros(2, 3))
        loss, gradient = _packed(make_objective(name), policy, policy, torch.zeros(2), mask)
        assert loss == 0.0 and torch.equal(gradient, torch.zeros(2, 3))


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, -1e10])
def test_h10_padding_may_hold_anything_in_both_tensors(name, junk):
    policy, old, mask = random_responses(4, 15, scale=0.01, dtype=torch.float32)
    advantages = torch.randn(4)
    clean = _padded(name, policy * mask, old * mask, advantages, mask)
    dirty = [values.masked_fill(~mask, junk) for values in (policy, old)]
    for computed in (
        _padded(name, *dirty, advantages, mask),
        _padded(name, dirty[0], old, advantages, mask),
        _padded(name, policy, dirty[1], advantages, mask),
    ):
        assert torch.equal(computed[0], clean[0])
        assert torch.equal(computed[1], clean[1])
    packed = _packed(make_objective(name), *dirty, advantages, mask)
    assert torch.equal(packed[0], _packed(make_objective(name), policy, old, advantages, mask)[0])
    assert bool(packed[1].isfinite().all())


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("which", ["policy", "old"])
def test_h10_a_nan_inside_the_response_stays_visible(name, which):
    policy, old, mask = random_responses(4, 15, dtype=torch.float32)
    (policy if which == "policy" else old)[1, 7] = math.nan  # the middle of the row is always valid
    for loss, gradient in (
        _padded(name, policy, old, torch.ones(4), mask),
        _packed(make_objective(name), policy, old, torch.ones(4), mask),
    ):
        assert bool(loss.isnan()) and bool(gradient[1, 7].isnan())


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_an_overflowed_weight_adds_nothing_instead_of_a_nan(advantage):
    policy = torch.tensor([[0.0, 200.0, 200.0]])
    loss, gradient = _padded(
        "cumulative", policy, torch.zeros(1, 3), torch.tensor([advantage]), torch.ones(1, 3) > 0
    )
    assert bool(loss.isfinite())
    assert torch.equal(gradient[0, 1:], torch.zeros(2))


def test_h14_only_the_first_update_on_a_batch_sees_weight_one():
    """Old log-probs stay as they were; weights and gate follow the learner."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 12, 9, generator=generator).requires_grad_()
    ids = torch.randint(9, (4, 12, 1), generator=generator)
    mask, advantages = torch.ones(4, 12) > 0, torch.tensor([1.0, -1.0, 2.0, -2.0])
    old = logits.detach().log_softmax(-1).gather(-1, ids).squeeze(-1)
    frozen = old.clone()
    largest = []
    for _ in range(3):
        policy = logits.log_softmax(-1).gather(-1, ids).squeeze(-1)
        loss, gradient = _padded("grpo", policy.detach(), old, advantages, mask)
        slope = -advantages[:, None] / mask.sum()
        largest.append(float((gradient / slope - 1).abs().max()))
        policy.backward(gradient)
        with torch.no_grad():
            logits -= 2.0 * logits.grad
            logits.grad = None
    assert largest[0] <= 1e-7 < 1e-3 < largest[1]
    assert torch.equal(old, frozen)


def test_the_loss_is_an_ordinary_node_of_the_graph():
    """Scaled and added to itself, as Megatron does, and read once more."""
    policy, old, mask = random_responses(3, 10)
    advantages = torch.ones(3, dtype=torch.float64)
    _, gradient = _padded("grpo", policy, old, advantages, mask)
    policy.requires_grad_()
    loss = policy_loss_padded("grpo", policy, old, advantages, mask)
    loss.mul(3.0).backward(retain_graph=True)
    torch.testing.assert_close(policy.grad, 3 * gradient, rtol=1e-15, atol=0)
    loss.backward()
    torch.testing.assert_close(policy.grad, 4 * gradient, rtol=1e-15, atol=0)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gradients_add_up_however_often_the_graph_is_run_backward(factor):
    policy, old, mask = random_responses(3, 9, scale=0.02)
    mask[:] = True
    policy.requires_grad_()
    loss = policy_loss_padded("grpo", policy, old, torch.tensor([1.0, -2.0, 3.0]), mask) * factor
    once = torch.autograd.grad(loss, policy, retain_graph=True)[0].clone()
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert torch.equal(policy.grad, once + once + once)


def test_only_the_policy_log_probs_carry_a_gradient():
    policy, old, mask = random_responses(2, 6)
    policy.requires_grad_()
    old.requires_grad_()
    advantages = torch.ones(2, dtype=torch.float64, requires_grad=True)
    policy_loss_padded("pnpo", policy, old, advantages, mask).backward()
    assert policy.grad is not None and old.grad is None and advantages.grad is None


def test_h16_bfloat16_log_probs_are_computed_with_in_float32():
    policy, old, mask = random_responses(3, 20, dtype=torch.bfloat16)
    advantages = torch.tensor([1.0, -1.0, 0.5])
    loss, gradient = _padded("grpo", policy, old, advantages, mask)
    wide = _padded("grpo", policy.float(), old.float(), advantages, mask)
    assert loss.dtype == torch.float32 and torch.equal(loss, wide[0])
    assert gradient.dtype == torch.bfloat16 and torch.equal(gradient, wide[1].bfloat16())


def test_chunks_of_rows_do_not_change_a_number(monkeypatch):
    policy, old, mask = random_responses(9, 25, dtype=torch.float32)
    advantages = torch.randn(9)
    whole = _padded("pnpo", policy, old, advantages, mask)
    monkeypatch.setattr("pnpo_megatron.algorithm.padded.CHUNK_TOKENS", 60)
    chunked = _padded("pnpo", policy, old, advantages, mask)
    assert torch.equal(whole[1], chunked[1])
    torch.testing.assert_close(whole[0], chunked[0], rtol=1e-6, atol=1e-9)


def test_the_mask_may_be_zeros_and_ones_and_the_objective_ready_made():
    policy, old, mask = random_responses(3, 10)
    advantages = torch.ones(3, dtype=torch.float64)
    by_name = _padded("pnpo", policy, old, advantages, mask)
    assert torch.equal(by_name[1], _padded("pnpo", policy, old, advantages, mask.long())[1])
    assert torch.equal(by_name[1], _padded(make_objective("pnpo"), policy, old, advantages, mask)[1])
    with pytest.raises(ValueError, match="gate_low given beside a ready Objective"):
        policy_loss_padded(make_objective("pnpo"), policy, old, advantages, mask, gate_low=0.1)


def test_shapes_that_do_not_fit_are_errors_that_say_both():
    policy, mask = torch.zeros(2, 3), torch.ones(2, 3) > 0
    with pytest.raises(ValueError, match=r"\[2, 3\] and advantages \[2, 3\]; expected \[B, T\] and \[B\]"):
        policy_loss_padded("pnpo", policy, policy, policy, mask)
    with pytest.raises(ValueError, match=r"response_mask is \[2, 2\]"):
        policy_loss_padded("pnpo", policy, policy, torch.zeros(2), mask[:, :2])
    stats = packed_ratio_stats(policy[0], policy[0], mask[0], torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"loss_share is \[2\], but policy_logprobs is \[3\]"):
        policy_loss(make_objective("pnpo"), policy[0], stats, policy[0], torch.zeros(2))
