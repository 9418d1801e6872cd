"""Gradient of each objective's surrogate on the toy process, exact over responses, against the true one."""

from __future__ import annotations

import torch
from torch import Tensor
from toy_process import STEPS, Policy, log_cumulative_ratio, true_gradient

from pnpo_megatron.algorithm import Objective, make_objective, padded_ratio_stats, token_terms

OPEN = {
    "token (GRPO's)": make_objective("grpo", gate="none", mean="response"),
    "prefix (PNPO's)": make_objective("pnpo", gate="none"),
    "sequence (GSPO's)": make_objective("gspo", gate="none"),
    "cumulative, current-token score": make_objective("cumulative", gate="none", mean="response"),
}
"""The ladder without gates: what the weight alone does."""


def standardised(behaviour: Policy, rewards: Tensor) -> Tensor:
    """[81] Eq. 10 in the limit of a large group: return minus its mean, over its standard deviation."""
    returns = rewards.sum(-1)
    centred = returns - behaviour.mean(returns)
    return centred / behaviour.mean(centred.square()).sqrt()


def surrogate_gradient(objective: Objective, learner: Policy, behaviour: Policy, rewards: Tensor) -> Tensor:
    """[120] gradient of Eq. 11 (response mean), expectation over the behaviour policy's responses."""
    mask = torch.ones_like(learner.logprobs, dtype=torch.bool)
    stats = padded_ratio_stats(learner.logprobs, behaviour.logprobs, mask)
    advantages = standardised(behaviour, rewards)[:, None].expand_as(stats.token)
    terms = token_terms(objective, stats, advantages)
    coefficient = torch.where(terms.keep, terms.weight * advantages, 0.0) / STEPS
    return behaviour.mean(torch.einsum("bt,btp->bp", coefficient, learner.scores))


def wanted_gradient(learner: Policy, behaviour: Policy, rewards: Tensor) -> Tensor:
    """[120] the true gradient in the surrogate's units: over the standard deviation and the length."""
    returns = rewards.sum(-1)
    deviation = behaviour.mean((returns - behaviour.mean(returns)).square()).sqrt()
    return true_gradient(learner, rewards) / deviation / STEPS


def exact_gradient(learner: Policy, behaviour: Policy, rewards: Tensor) -> Tensor:
    """[120] Eq. 6: C_t, the behaviour's advantage and the cumulative prefix score; unbiased at any lag."""
    ratio = log_cumulative_ratio(learner, behaviour).exp()
    terms = ratio * behaviour.advantages(rewards)
    return behaviour.mean(torch.einsum("bt,btp->bp", terms, learner.scores.cumsum(1)))


def reused(
    objective: Objective, behaviour: Policy, rewards: Tensor, updates: int, rate: float
) -> list[Policy]:
    """The learner after 0..updates steps of gradient ascent on the surrogate of one batch: growing lag."""
    learners = [behaviour]
    for _ in range(updates):
        step = rate * surrogate_gradient(objective, learners[-1], behaviour, rewards)
        learners.append(Policy(learners[-1].logits + step.view_as(behaviour.logits)))
    return learners


def relative_bias(gradient: Tensor, wanted: Tensor) -> float:
    """|gradient - wanted| / |wanted|."""
    return float((gradient - wanted).norm() / wanted.norm())
