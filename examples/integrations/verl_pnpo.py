"""PNPO as a policy loss of verl 0.9.1. With this folder and pnpo-megatron on PYTHONPATH of every worker:

actor_rollout_ref.model.external_lib=verl_pnpo  actor_rollout_ref.actor.policy_loss.loss_mode=pnpo
actor_rollout_ref.actor.clip_ratio_low=7e-4     actor_rollout_ref.actor.clip_ratio_high=9.5e-4
actor_rollout_ref.actor.ppo_epochs=4            actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss

from pnpo_megatron.algorithm import make_objective, padded_ratio_stats, policy_loss_padded, token_terms


@register_policy_loss("pnpo")
def pnpo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Eq. 11 on one micro-batch, [B, T] each, over the whole mini-batch's responses as verl counts them."""
    if loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(
            f"loss_agg_mode = {loss_agg_mode}: PNPO averages over responses; use seq-mean-token-mean"
        )
    if rollout_is_weights is not None:
        raise ValueError("PNPO has its own weight: switch verl's rollout correction off")
    mask = response_mask.bool()
    per_response = (
        torch.where(mask, advantages, -torch.inf).amax(-1).clamp_min(torch.finfo(advantages.dtype).min)
    )
    if not torch.where(mask, advantages == per_response[:, None], True).all():
        raise ValueError("PNPO's advantage is one number a response: use adv_estimator=grpo")
    gate = {"gate_low": config.clip_ratio_low, "gate_high": config.clip_ratio_high}
    per_response = torch.where(mask.any(-1), per_response, 0.0)
    loss = policy_loss_padded("pnpo", log_prob, old_log_prob, per_response, mask, **gate)
    responses, counts = mask.any(-1).sum(), config.global_batch_info
    total = counts.get("global_batch_size") or responses.clamp(min=1)
    stats = padded_ratio_stats(log_prob, old_log_prob, mask)
    terms = token_terms(make_objective("pnpo", **gate), stats, per_response[:, None])
    metrics = {
        "actor/pg_clipfrac": ((~terms.keep & mask).sum() / mask.sum().clamp(min=1)).item(),
        "actor/ppo_kl": (-stats.token.sum() / mask.sum().clamp(min=1)).item(),
    }
    return loss * responses / total * counts.get("dp_size", 1), metrics
