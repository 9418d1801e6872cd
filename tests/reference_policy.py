"""The learner's update in float64 with transformers, one sequence at a time, from the formulas alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hf_models import make_hf_model, save_hf_model
from learner_parts import GATES, with_old
from torch import Tensor
from transformers import AutoModelForCausalLM

from pnpo_megatron.types import TrainSequence

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def write_model(folder: Path, family: str = "qwen2", **changes: Any) -> Path:
    """A small random model with biases and norms perturbed."""
    return save_hf_model(make_hf_model(family, **{**SMALL, **changes}), folder)


@dataclass
class Reference:
    """Float64 results of one mini-batch."""

    loss: float
    scale: float
    """sum |share * coefficient * logp|: what a loss difference is measured against (DECISIONS)."""
    gradients: dict[str, Tensor]
    rejected: int
    nearest: float
    """Smallest |expm1(log w) - bound|."""


class ReferencePolicy:
    """The same HF folder in transformers, float64, one sequence at a time."""

    def __init__(self, folder: Path, temperature: float = 1.0) -> None:
        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)
        self.temperature = temperature

    def logprobs(self, ids: Tensor) -> Tensor:
        """[n] float64, token-aligned; entry 0 is 0."""
        logits = self.model(ids[None]).logits[0, :-1] / self.temperature
        scores = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        return torch.cat([scores.new_zeros(1), scores])

    def drifted(self, sequences: list[TrainSequence], spread: float, seed: int) -> list[TrainSequence]:
        """Old log-probs at a random distance from the policy's own."""
        generator = torch.Generator().manual_seed(seed)
        old = []
        with torch.no_grad():
            for one in sequences:
                noise = spread * torch.randn(len(one.ids), generator=generator)
                old.append(torch.where(one.response_mask, self.logprobs(one.ids) + noise, 0.0))
        return with_old(sequences, old)

    def update(self, sequences: list[TrainSequence], name: str) -> Reference:
        """Loss and gradients of pnpo, gspo or grpo from the formulas, with gradients in `self.model`."""
        tolerance = GATES[name]
        responses = sum(bool(one.response_mask.any()) for one in sequences)
        tokens = sum(int(one.response_mask.sum()) for one in sequences)
        self.model.zero_grad()
        total, scale, rejected, nearest = 0.0, 0.0, 0, torch.inf
        for one in sequences:
            mask = one.response_mask
            length = int(mask.sum())
            if length == 0:
                continue
            policy = self.logprobs(one.ids)[mask]
            ratio = policy.detach() - one.old_logprobs[mask].double()
            t = torch.arange(1, length + 1, dtype=torch.float64)
            advantage = one.advantage
            if name == "pnpo":
                log_weight, h = ratio.cumsum(0) / t, (length / t).sqrt()
                low, high = -tolerance["gate_low"] * h, tolerance["gate_high"] * h
                keep = (log_weight.expm1() >= low) & (log_weight.expm1() <= high)
                edges = torch.stack([log_weight.expm1() - low, log_weight.expm1() - high])
            else:
                log_weight = ratio if name == "grpo" else ratio.mean().expand(length)
                weight = log_weight.exp()
                low, high = 1 - tolerance["clip_low"], 1 + tolerance["clip_high"]
                keep = (weight <= high) if advantage > 0 else (weight >= low)
                if advantage == 0:
                    keep = torch.ones_like(keep)
                if name == "grpo" and advantage < 0:
                    keep &= weight <= tolerance["dual_clip"]
                edges = torch.stack([weight - low, weight - high])
            token_share = 1 / tokens if name == "grpo" else 1 / (length * responses)
            terms = -token_share * keep * log_weight.exp() * advantage * policy
            terms.sum().backward()
            total += float(terms.sum().detach())
            scale += float(terms.abs().sum().detach())
            rejected += int((~keep).sum())
            nearest = min(nearest, float(edges.abs().min()))
        gradients = {key: value.grad.clone() for key, value in self.model.named_parameters()}
        return Reference(total, scale, gradients, rejected, nearest)
