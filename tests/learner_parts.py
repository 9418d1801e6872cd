"""A tiny policy on Megatron-Core and mini-batches for it; `reference_policy` is the other side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pnpo_megatron.types import MiniBatch, TrainSequence

GATES: dict[str, dict[str, Any]] = {
    "pnpo": {"gate_low": 0.011, "gate_high": 0.023},  # short responses: some are kept, some rejected
    "gspo": {"clip_low": 0.012, "clip_high": 0.017},
    "grpo": {"clip_low": 0.05, "clip_high": 0.07, "dual_clip": 10.0},
}


def make_learner(
    folder: Path,
    parallel: Any = None,
    *,
    optimizer: Any = None,
    dtype: torch.dtype = torch.float32,
    recompute: str = "none",
    megatron: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A learner on this process's ranks; Megatron's groups are set up anew.

    `parallel` and `optimizer` are settings objects, `megatron` overrides TransformerConfig, `settings` are
    LearnerSettings.
    """
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
    chunks = build_model(source.architecture, parallel, dtype=dtype, recompute=recompute, **(megatron or {}))
    load_hf_weights(chunks, source, groups)
    optimizer = optimizer or OptimizerSettings(lr=0.0, warmup_steps=0, clip_grad=0.0, distributed=False)
    return MegatronLearner(chunks, source.architecture, groups, optimizer, LearnerSettings(**settings))


def random_sequences(count: int, *, seed: int, vocab: int = 131, longest: int = 24) -> list[TrainSequence]:
    """Prompts of 1 to 6 tokens, responses of 1 to `longest`, some with a hole in their mask, one masked."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    sequences = []
    for row in range(count):
        prompt, response = draw(1, 6), draw(1, longest)
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
