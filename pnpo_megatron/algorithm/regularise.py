"""What may be added to the policy loss: a pull back to the run's first weights, and one towards entropy."""

import torch
from torch import Tensor


def regulariser(
    policy_logprobs: Tensor,
    entropy: Tensor,
    reference_logprobs: Tensor | None,
    loss_share: Tensor,
    *,
    kl_coef: float,
    entropy_coef: float,
) -> Tensor:
    """Scalar sum over trained tokens of (kl_coef * k3 - entropy_coef * H) * share; no gate applies to it.

    Args:
        policy_logprobs, entropy: [n] float32, nats, with gradients.
        reference_logprobs: [n] of the same tokens; needed where kl_coef is not 0.
        loss_share: [n] float32, as in `policy_loss`.
    """
    total = torch.zeros_like(loss_share)
    if entropy_coef:  # a gradient of the entropy, even of zeros, is a second pass over the logits
        total = total - entropy_coef * entropy
    if kl_coef:
        assert reference_logprobs is not None
        total = total + kl_coef * k3(policy_logprobs, reference_logprobs)
    return (total * loss_share).sum()


def k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log reference - log policy: estimates KL(policy | reference), never below 0,
    unbiased for tokens that the policy drew (joschu.net/blog/kl-approx.html)."""
    difference = reference_logprobs - policy_logprobs
    return difference.expm1() - difference
