"""PNPO in TRL 1.16: a GRPOTrainer whose loss is Eq. 11. Epochs over a batch are TRL's `num_iterations`:

trainer = PNPOTrainer(model=..., reward_funcs=..., train_dataset=..., gate_low=7e-4, gate_high=9.5e-4,
args=GRPOConfig(num_iterations=4, beta=0.0))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from pnpo_megatron.algorithm import make_objective, padded_ratio_stats, policy_loss_padded, token_terms


class PNPOTrainer(GRPOTrainer):
    """GRPO's sampling, rewards and advantages with PNPO's weight and gate."""

    def __init__(self, *args: Any, gate_low: float = 7e-4, gate_high: float = 9.5e-4, **kwargs: Any) -> None:
        """The two tolerances of the gate at t = L; everything else is GRPOTrainer's."""
        super().__init__(*args, **kwargs)
        if self.beta:
            raise ValueError(f"beta = {self.beta}: this loss has no KL term; use beta = 0.0")
        self.objective = make_objective("pnpo", gate_low=gate_low, gate_high=gate_high)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        policy, _, _ = self._get_per_token_logps_and_entropies(
            model, ids, attention, inputs["completion_ids"].shape[1], compute_entropy=False
        )
        old = inputs.get("old_per_token_logps")  # absent where TRL knows that the policy has not moved
        old = policy.detach() if old is None else old
        advantages = inputs["advantages"]
        loss = policy_loss_padded(self.objective, policy, old, advantages, mask)
        stats = padded_ratio_stats(policy, old, mask.bool())
        rejected = ~token_terms(self.objective, stats, advantages[:, None]).keep & mask.bool()
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["gate/rejected_fraction"].append(float(rejected.sum() / mask.sum().clamp(min=1)))
        return loss / (self.current_gradient_accumulation_steps if mode == "train" else 1.0)
