"""An autoregressive process small enough to enumerate: 3 tokens, 4 steps, a table of logits for every prefix.

Every expectation is a sum over the 81 responses, in float64. Scores are written down by hand (one-hot minus
softmax) and the true gradient comes from automatic differentiation of the expected return, so that neither
is computed from the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

TOKENS, STEPS = 3, 4
RESPONSES = torch.tensor(list(product(range(TOKENS), repeat=STEPS)))
"""[81, 4] every response."""
PREFIXES = [sum(TOKENS**step for step in range(position)) for position in range(STEPS + 1)]
"""Row of the first prefix with 0, 1, .. tokens in the table of logits; the last is their number, 40."""


def prefix_numbers() -> Tensor:
    """[81, 5] number of the prefix of 0..4 tokens of every response, 0..3^t - 1."""
    columns = [torch.zeros(len(RESPONSES), dtype=torch.int64)]
    for position in range(STEPS):
        columns.append(columns[-1] * TOKENS + RESPONSES[:, position])
    return torch.stack(columns, dim=1)


NUMBERS = prefix_numbers()
ROWS = NUMBERS[:, :STEPS] + torch.tensor(PREFIXES[:STEPS])
"""[81, 4] row of the state s_t of every response in the table of logits."""


@dataclass(frozen=True)
class Policy:
    """A softmax over 3 tokens at each of 40 prefixes."""

    logits: Tensor
    """[40, 3] float64."""

    @cached_property
    def logprobs(self) -> Tensor:
        """[81, 4] log pi(a_t | s_t)."""
        return self.logits.log_softmax(-1)[ROWS, RESPONSES]

    @cached_property
    def probability(self) -> Tensor:
        """[81] of a whole response; sums to 1."""
        return self.logprobs.sum(-1).exp()

    @cached_property
    def scores(self) -> Tensor:
        """[81, 4, 120] z_t = gradient of log pi(a_t | s_t) by the logits, flattened."""
        count = len(RESPONSES)
        table = torch.zeros(count, STEPS, *self.logits.shape, dtype=torch.float64)
        response, step = torch.meshgrid(torch.arange(count), torch.arange(STEPS), indexing="ij")
        table[response, step, ROWS] = -self.logits.softmax(-1)[ROWS]
        table[response, step, ROWS, RESPONSES] += 1.0
        return table.flatten(2)

    def mean(self, values: Tensor) -> Tensor:
        """Expectation over whole responses of values [81, ...]."""
        return torch.tensordot(self.probability, values, dims=1)

    def mean_given(self, tokens: int, values: Tensor) -> Tensor:
        """[81] expectation of values [81] given the first `tokens` tokens of each response."""
        group = NUMBERS[:, tokens]
        zeros = torch.zeros(TOKENS**tokens, dtype=torch.float64)
        weighted = zeros.index_add(0, group, self.probability * values)
        return (weighted / zeros.index_add(0, group, self.probability))[group]

    def advantages(self, rewards: Tensor) -> Tensor:
        """[81, 4] finite-horizon advantage A_t = Q_t(s_t, a_t) - V_t(s_t) of immediate rewards [81, 4]."""
        to_go = rewards.flip(-1).cumsum(-1).flip(-1)
        columns = [
            self.mean_given(position + 1, to_go[:, position]) - self.mean_given(position, to_go[:, position])
            for position in range(STEPS)
        ]
        return torch.stack(columns, dim=1)


def random_policy(generator: torch.Generator, scale: float = 1.0) -> Policy:
    """Independent normal logits."""
    return Policy(scale * torch.randn(PREFIXES[-1], TOKENS, generator=generator, dtype=torch.float64))


def random_rewards(generator: torch.Generator) -> Tensor:
    """[81, 4] immediate rewards r_t(s_t, a_t): equal for responses that share the prefix through a_t."""
    columns = [
        torch.randn(TOKENS ** (position + 1), generator=generator, dtype=torch.float64)[
            NUMBERS[:, position + 1]
        ]
        for position in range(STEPS)
    ]
    return torch.stack(columns, dim=1)


def true_gradient(policy: Policy, rewards: Tensor) -> Tensor:
    """[120] gradient of the expected return, by automatic differentiation."""
    logits = policy.logits.clone().requires_grad_()
    Policy(logits).mean(rewards.sum(-1)).backward()
    assert logits.grad is not None
    return logits.grad.flatten()


def log_cumulative_ratio(learner: Policy, behaviour: Policy) -> Tensor:
    """[81, 4] log C_t, Eq. 3."""
    return (learner.logprobs - behaviour.logprobs).cumsum(-1)
