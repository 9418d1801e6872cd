"""The policy loss, Eq. 11: an objective is a weight, a gate and a mean."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pnpo_megatron.algorithm.gates import Gate
from pnpo_megatron.algorithm.ratios import RatioStats, check_same_shape
from pnpo_megatron.algorithm.select import zero_outside_
from pnpo_megatron.algorithm.weights import Weight

Mean = Literal["response", "token"]
Score = Literal["token", "prefix"]


@dataclass(frozen=True)
class Objective:
    """Which tokens count, and how much. `make_objective` builds the named ones."""

    name: str
    weight: Weight
    gate: Gate
    mean: Mean
    """"response": over a response's tokens, then over responses (PNPO, GSPO); "token": all alike (GRPO)."""
    score: Score = "token"
    """Whose score a token's coefficient multiplies: its own (Eq. 11), or the sum over its prefix (Eq. 6)."""
    renormalise: bool = False
    """Rejected tokens leave the denominators of the mean as well, as if they were not trained on."""

    def log_weight(self, stats: RatioStats) -> Tensor:
        """The log-weight in the log-ratios' own type: float64 sums are divided first, then cast, once."""
        return self.weight(stats).to(stats.token.dtype)


@dataclass(frozen=True)
class TokenTerms:
    """What the objective decided about every token; all detached, of the shape of `RatioStats.token`."""

    log_weight: Tensor
    """log w_t, float32."""
    weight: Tensor
    """w_t, float32."""
    below: Tensor
    """bool: rejected, w_t under its lower bound."""
    above: Tensor
    """bool: rejected, w_t over its upper bound, or infinite."""
    accepted: Tensor | None = None
    """Kept trained tokens of the token's own response, where the mean is over those."""

    @property
    def keep(self) -> Tensor:
        """Bool: the token moves the policy (or carries a NaN, which no gate hides)."""
        return ~(self.below | self.above)


@torch.no_grad()
def token_terms(objective: Objective, stats: RatioStats, advantages: Tensor) -> TokenTerms:
    """Weight and gate of every token; `advantages` broadcasts to the shape of `stats.token`."""
    log_weight = objective.log_weight(stats).expand_as(stats.token)
    excess = log_weight.expm1()
    lower, upper = objective.gate(advantages, stats)
    below, above = excess < lower, excess > upper
    return TokenTerms(log_weight, torch.exp(log_weight, out=excess), below, above)


def policy_loss(
    objective: Objective, policy_logprobs: Tensor, stats: RatioStats, advantages: Tensor, loss_share: Tensor
) -> tuple[Tensor, TokenTerms]:
    """Detached score-function surrogate, PNPO paper Eq. 11 (arXiv 2608.01418).

        loss = - sum_t sg[ keep_t * w_t * A_t ] * share_t * log pi(y_t)

    One form serves every objective. For grpo and gspo its gradient is that of the published min/clip loss;
    its *value* is not, so compare runs by reward and diagnostics.

    Args:
        policy_logprobs: [T] float, nats; the only input that carries a gradient.
        stats: [T] log-ratio statistics, already complete across context-parallel ranks.
        advantages, loss_share: [T] float32; both 0 outside the response.

    Returns:
        Scalar *sum* over local tokens, and what was decided about each of them. Adding the sum over
        micro-batches and ranks gives the mean over the mini-batch. Rejected tokens add 0 and the others are
        not rescaled. A NaN inside the response makes the loss NaN; outside it nothing is looked at.
    """
    check_same_shape(
        policy_logprobs=policy_logprobs, stats=stats.token, advantages=advantages, loss_share=loss_share
    )
    terms = token_terms(objective, stats, advantages)
    with torch.no_grad():
        mask = loss_share > 0
        terms, slope = token_slope(objective, stats, terms, advantages * loss_share, mask)
        value = surrogate_value(slope, policy_logprobs, mask)
    return attach_slope(policy_logprobs, slope, value), terms


def token_slope(
    objective: Objective,
    stats: RatioStats,
    terms: TokenTerms,
    scale: Tensor,
    mask: Tensor,
    out: Tensor | None = None,
) -> tuple[TokenTerms, Tensor]:
    """The slope d loss / d log pi of every token by the objective's score, 0 off the mask.

    Eq. 6 multiplies token t's coefficient by the scores of all k <= t, so token k collects those of all
    t >= k: a suffix sum. A * share is one number a response and stays outside it, where the grid of the sum
    would be too coarse for it.

    Args:
        scale: A * share. When renormalising over responses, share becomes 1 / (kept_i B'), and the terms say
            kept_i; `renormalising_factor` is what is then left, and is known once all tokens are.
    """
    if objective.renormalise:
        _, accepted = stats.suffix_sums((terms.keep & mask).to(stats.token.dtype))
        terms = replace(terms, accepted=accepted)
        if objective.mean == "response":
            scale = scale * (stats.length / accepted.clamp(min=1)).to(scale.dtype)
    if objective.score == "token":
        return terms, loss_slope(terms, scale, mask, out)
    coefficients = zero_outside_(terms.weight.clone(), terms.keep & mask)
    collected = stats.suffix_sums(coefficients)[0].to(scale.dtype)
    return terms, zero_outside_(torch.mul(collected, -scale, out=out), mask)


def renormalising_factor(
    mean: Mean, *, tokens: float, kept: float, responses: float, kept_responses: float
) -> float:
    """What turns the loss over all trained tokens into that over the kept ones; counts of a whole mini-batch.

    A loss is a sum and these counts are sums, so the loss, or its gradient, may be multiplied at the end: no
    split can change the result. With nothing kept the loss is 0 and stays so.
    """
    whole, left = (tokens, kept) if mean == "token" else (responses, kept_responses)
    return whole / left if left else 1.0


def loss_slope(terms: TokenTerms, scale: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """The slope d loss / d log pi = -w * scale, with `scale` = A * share; written to `out`, if given.

    Exactly 0 on rejected tokens and off the mask: selected, not multiplied, for 0 * inf is NaN.
    """
    return zero_outside_(torch.mul(terms.weight, -scale, out=out), terms.keep & mask)


def surrogate_value(slope: Tensor, policy_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Scalar sum of slope * log pi over the mask; elsewhere may stand anything, NaN included."""
    return zero_outside_(policy_logprobs.detach() * slope, mask).sum()


def attach_slope(policy_logprobs: Tensor, slope: Tensor, value: Tensor) -> Tensor:
    """`value` as a function of `policy_logprobs` with the given gradient."""
    return _Surrogate.apply(policy_logprobs, slope, value)  # type: ignore[no-any-return, no-untyped-call]


class _Surrogate(torch.autograd.Function):
    """sum(slope * log pi) with a value computed beforehand: nothing but the slope is kept for backward."""

    @staticmethod
    def forward(ctx: Any, policy_logprobs: Tensor, slope: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.logprob_dtype = policy_logprobs.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        (grad,) = grad_outputs
        if grad.device.type != "cpu" or grad != 1:  # looking is free there, the product costs a pass
            slope = slope * grad
        return slope.to(ctx.logprob_dtype), None, None


def loss_shares(lengths: Tensor, mean: Mean) -> Tensor:
    """The share of each trained token of response i in the mean over a whole mini-batch.

    Args:
        lengths: [B] int, trained tokens a response, over all ranks: the denominators are global (TRAPS H09).
        mean: "response": 1 / (L_i * B'), with B' the responses of at least one token; "token": 1 / sum of L.

    Returns:
        [B] float64; 0 for a response without a token, which is not counted in B' either.
    """
    if mean not in ("response", "token"):
        raise ValueError(f"mean = {mean!r}: expected 'response' or 'token'")
    has_tokens = lengths > 0
    if mean == "token":
        shares = lengths.sum().to(torch.float64).reciprocal().expand(lengths.shape)
    else:
        shares = (lengths.to(torch.float64) * has_tokens.sum()).reciprocal()
    return torch.where(has_tokens, shares, 0.0)
