"""The objective as pure functions of tensors: torch in, torch out."""

from pnpo_megatron.algorithm.advantages import group_relative
from pnpo_megatron.algorithm.objective import Objective, TokenTerms, loss_shares, policy_loss, token_terms
from pnpo_megatron.algorithm.padded import policy_loss_padded
from pnpo_megatron.algorithm.presets import PRESETS, make_objective, objective_settings
from pnpo_megatron.algorithm.ratios import RatioStats, packed_ratio_stats, padded_ratio_stats
from pnpo_megatron.algorithm.weights import resolve_weight

__all__ = [
    "PRESETS",
    "Objective",
    "RatioStats",
    "TokenTerms",
    "group_relative",
    "loss_shares",
    "make_objective",
    "objective_settings",
    "packed_ratio_stats",
    "padded_ratio_stats",
    "policy_loss",
    "policy_loss_padded",
    "resolve_weight",
    "token_terms",
]
