"""The paper's identities by full enumeration of a toy process, where gradients are of order 1."""

from __future__ import annotations

import pytest
import torch
from surrogate_bias import (
    OPEN,
    exact_gradient,
    relative_bias,
    reused,
    standardised,
    surrogate_gradient,
    wanted_gradient,
)
from toy_process import (
    NUMBERS,
    STEPS,
    TOKENS,
    log_cumulative_ratio,
    random_policy,
    random_rewards,
    true_gradient,
)

from pnpo_megatron.algorithm import make_objective, padded_ratio_stats, policy_loss

EXACT = 1e-12


@pytest.fixture(params=range(5))
def process(request):
    """Behaviour, a learner far from it, and rewards."""
    generator = torch.Generator().manual_seed(request.param)
    return random_policy(generator), random_policy(generator), random_rewards(generator)


def test_the_toy_process_is_a_process(process):
    behaviour, _, rewards = process
    assert behaviour.probability.sum().item() == pytest.approx(1.0, abs=1e-14)
    assert behaviour.mean(behaviour.scores).abs().max() < 1e-14  # a score has mean 0
    sums = behaviour.advantages(rewards).sum(-1) + behaviour.mean(rewards.sum(-1))
    torch.testing.assert_close(sums, rewards.sum(-1), rtol=0, atol=EXACT)  # Eq. 36 telescopes


def test_the_score_by_hand_is_the_derivative_of_the_log_probability(process):
    behaviour, _, _ = process
    logits = behaviour.logits.clone().requires_grad_()
    total = type(behaviour)(logits).logprobs
    for response, step in ((0, 0), (40, 2), (80, 3)):
        (gradient,) = torch.autograd.grad(total[response, step], logits, retain_graph=True)
        torch.testing.assert_close(gradient.flatten(), behaviour.scores[response, step], rtol=0, atol=1e-14)


def test_equation_3_the_cumulative_ratio_is_the_ratio_of_visits(process):
    behaviour, learner, _ = process
    ratio = log_cumulative_ratio(learner, behaviour).exp()
    for tokens in range(1, STEPS + 1):
        zeros = torch.zeros(TOKENS**tokens, dtype=torch.float64)
        visits = [
            zeros.index_add(0, NUMBERS[:, tokens], policy.probability) for policy in (learner, behaviour)
        ]
        expected = (visits[0] / visits[1])[NUMBERS[:, tokens]]
        torch.testing.assert_close(ratio[:, tokens - 1], expected, rtol=EXACT, atol=0)


def test_equation_4_changes_the_measure_at_every_position(process):
    behaviour, learner, _ = process
    ratio = log_cumulative_ratio(learner, behaviour).exp()
    functions = random_rewards(torch.Generator().manual_seed(99))  # any f_t(s_t, a_t)
    error = behaviour.mean(ratio * functions) - learner.mean(functions)
    assert error.abs().max() < EXACT
    assert (behaviour.mean(functions) - learner.mean(functions)).abs().max() > 0.01  # the policies do differ


def test_equation_4_fails_for_the_token_ratio_and_the_prefix_mean_after_the_first_token(process):
    behaviour, learner, _ = process
    functions = random_rewards(torch.Generator().manual_seed(99))
    log_ratio = learner.logprobs - behaviour.logprobs
    prefix_mean = log_ratio.cumsum(-1) / torch.arange(1, STEPS + 1)
    for log_weight in (log_ratio, prefix_mean):
        error = (behaviour.mean(log_weight.exp() * functions) - learner.mean(functions)).abs()
        assert error[0] < EXACT
        assert error[1:].max() > 1e-3


def test_equation_5_learner_advantage_with_the_current_token_score_is_unbiased(process):
    behaviour, learner, rewards = process
    ratio = log_cumulative_ratio(learner, behaviour).exp()
    terms = ratio * learner.advantages(rewards)
    estimate = behaviour.mean(torch.einsum("bt,btp->bp", terms, learner.scores))
    assert (estimate - true_gradient(learner, rewards)).abs().max() < EXACT


def test_equation_6_behaviour_advantage_with_the_prefix_score_is_unbiased(process):
    behaviour, learner, rewards = process
    error = exact_gradient(learner, behaviour, rewards) - true_gradient(learner, rewards)
    assert error.abs().max() < EXACT


def test_behaviour_advantage_with_the_current_token_score_has_the_bias_of_the_advantages(process):
    behaviour, learner, rewards = process
    ratio = log_cumulative_ratio(learner, behaviour).exp()
    terms = ratio * behaviour.advantages(rewards)
    estimate = behaviour.mean(torch.einsum("bt,btp->bp", terms, learner.scores))
    bias = estimate - true_gradient(learner, rewards)
    gap = behaviour.advantages(rewards) - learner.advantages(rewards)  # Eq. 44 takes it for 0
    assert (bias - learner.mean(torch.einsum("bt,btp->bp", gap, learner.scores))).abs().max() < EXACT
    assert bias.norm() > 0.05 * true_gradient(learner, rewards).norm()


def test_every_rung_is_unbiased_without_lag(process):
    behaviour, _, rewards = process
    wanted = wanted_gradient(behaviour, behaviour, rewards)
    for objective in [*OPEN.values(), make_objective("pnpo")]:
        error = surrogate_gradient(objective, behaviour, behaviour, rewards) - wanted
        assert error.abs().max() < EXACT


def test_the_surrogates_bias_grows_with_lag_and_equation_6_has_none(process):
    behaviour, _, rewards = process
    objective = OPEN["prefix (PNPO's)"]
    learners = reused(objective, behaviour, rewards, updates=16, rate=2.0)
    bias = [
        relative_bias(
            surrogate_gradient(objective, learner, behaviour, rewards),
            wanted_gradient(learner, behaviour, rewards),
        )
        for learner in learners
    ]
    assert bias[0] < EXACT
    assert bias[1] < bias[4] < bias[16]
    assert bias[16] > 0.05
    for learner in learners:
        error = exact_gradient(learner, behaviour, rewards) - true_gradient(learner, rewards)
        assert error.abs().max() < EXACT


@pytest.mark.parametrize("name", ["pnpo", "gspo", "grpo", "cumulative", "minpro"])
def test_the_products_loss_has_the_gradient_of_the_enumerated_surrogate(process, name):
    behaviour, learner, rewards = process
    gate = "clip" if name != "pnpo" else "sqrt"
    tolerances = {f"{'clip' if gate == 'clip' else 'gate'}_{side}": 0.3 for side in ("low", "high")}
    objective = make_objective(name, mean="response", **tolerances)
    logits = learner.logits.clone().requires_grad_()
    logprobs = type(learner)(logits).logprobs
    stats = padded_ratio_stats(logprobs, behaviour.logprobs, torch.ones_like(logprobs, dtype=torch.bool))
    share = behaviour.probability[:, None].expand_as(logprobs) / STEPS
    advantages = standardised(behaviour, rewards)[:, None].expand_as(logprobs)
    policy_loss(objective, logprobs, stats, advantages, share)[0].backward()
    expected = surrogate_gradient(objective, learner, behaviour, rewards)
    assert expected.norm() > 0.01
    torch.testing.assert_close(-logits.grad.flatten(), expected, rtol=0, atol=EXACT)
