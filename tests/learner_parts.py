"""A tiny policy on Megatron-Core, mini-batches for it, and the same update in float64 without our code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hf_models import make_hf_model, save_hf_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from pnpo_megatron.types import MiniBatch, TrainSequence

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GATES: dict[str, dict[str, Any]] = {
    "pnpo": {"gate_low": 0.011, "gate_high": 0.023},  # short responses: some are kept, some rejected
    "gspo": {"clip_low": 0.012, "clip_high": 0.017},
    "grpo": {"clip_low": 0.05, "clip_high": 0.07, "dual_clip": 10.0},
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A random Qwen2 with biases and norms perturbed."""
    return save_hf_model(make_hf_model("qwen2", **{**SMALL, **changes}), folder)


def make_learner(folder: Path, parallel: Any = None, *, optimizer: Any = None, **settings: Any) -> Any:
    """A learner on this process's ranks; Megatron's groups are set up anew."""
    from pnpo_megatron.convert.hf_folder import HfFolder
    from pnpo_megatron.convert.stream import load_hf_weights
    from pnpo_megatron.policy.learner import LearnerSettings, MegatronLearner
    from pnpo_megatron.policy.model import build_model
    from pnpo_megatron.policy.optimizer import OptimizerSettings
    from pnpo_megatron.policy.process_groups import ParallelSettings, initialize_parallel, release_parallel

    release_parallel()
    parallel = parallel or ParallelSettings()
    groups = initialize_parallel(parallel, seed=3)
    source = HfFolder(folder)
    chunks = build_model(source.architecture, parallel, dtype=torch.float32)
    load_hf_weights(chunks, source, groups)
    optimizer = optimizer or OptimizerSettings(lr=0.0, warmup_steps=0, clip_grad=0.0, distributed=False)
    return MegatronLearner(chunks, source.architecture, groups, optimizer, LearnerSettings(**settings))


def random_sequences(count: int, *, seed: int, vocab: int = 131) -> list[TrainSequence]:
    """Prompts of 1 to 6 tokens, responses of 1 to 24, some with a hole in the mask, one wholly masked."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    sequences = []
    for row in range(count):
        prompt, response = draw(1, 6), draw(1, 24)
        mask = torch.tensor([False] * prompt + [True] * response)
        if row % 5 == 1:
            mask[prompt + response // 2] = False
        if row == 3:
            mask[:] = False
        ids = torch.randint(3, vocab, (prompt + response,), generator=generator)
        rollout = torch.where(mask, -torch.rand(len(ids), generator=generator), 0.0)
        advantage = float(torch.randn((), generator=generator)) if row % 7 != 2 else 0.0
        sequences.append(TrainSequence(ids, mask, rollout, advantage))
    return sequences


def share(sequences: list[TrainSequence], mean: str) -> MiniBatch:
    """The mini-batch of these sequences, with the product's shares (tested against numbers elsewhere)."""
    from pnpo_megatron.data.batching import shares_of

    return MiniBatch(tuple(sequences), shares_of(sequences, mean), tuple(range(len(sequences))))


def with_old(sequences: list[TrainSequence], old: list[Tensor]) -> list[TrainSequence]:
    return [replace(one, old_logprobs=logprobs.float()) for one, logprobs in zip(sequences, old, strict=True)]


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
        options = {"dtype": torch.float64, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options)
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


def gradients_of(learner: Any) -> dict[str, Tensor]:
    """HF-named summed gradients of a learner without tensor or pipeline splits, as DDP left them."""
    from pnpo_megatron.convert.families import all_rows
    from pnpo_megatron.convert.stream import local_parameters, padded_vocab_of, sizes_of

    parameters = local_parameters(learner.chunks, learner.arch, learner.groups)
    found = {}
    for row in all_rows(learner.arch):
        parameter = parameters[row.megatron]
        padded = padded_vocab_of(learner.arch, parameter, learner.groups) if parameter.shape[0] >= 131 else 0
        pieces = row.layout.split(parameter.main_grad, sizes_of(learner.arch, padded))
        found.update(zip(row.hf, (piece.clone() for piece in pieces), strict=True))
    return found


def worst_gradient(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest norm of difference / norm of reference over tensors (DECISIONS)."""
    return max(float((found[name].double() - wanted[name]).norm() / wanted[name].norm()) for name in wanted)
