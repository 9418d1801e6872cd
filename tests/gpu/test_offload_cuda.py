"""A learner that leaves the GPU frees its gradients, master weights and moments, and comes back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pnpo_megatron.algorithm import make_objective

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def norms(folder: Path, leaves: bool) -> tuple[list[float], int, int]:
    """Gradient norms of three updates; bytes freed by the last leave; bytes of all parameters."""
    from learner_parts import make_learner, random_sequences, share, with_old

    from pnpo_megatron.policy.offload import LearnerMemory
    from pnpo_megatron.policy.optimizer import OptimizerSettings

    learner: Any = make_learner(
        folder, optimizer=OptimizerSettings(lr=1e-3, warmup_steps=0), dtype=torch.bfloat16, max_tokens=96
    )
    memory, found, freed = LearnerMemory(learner), [], 0
    sequences = random_sequences(9, seed=1)
    scored = with_old(sequences, learner.log_probs(share(sequences, "response")))
    for _ in range(3):
        if leaves:
            before = torch.cuda.memory_allocated()
            memory.offload()
            freed = before - torch.cuda.memory_allocated()
            learner.log_probs(share(sequences, "response"))
            memory.reload()
        objective = make_objective("pnpo", gate_low=0.9, gate_high=99.0)
        found.append(learner.update(share(scored, "response"), objective, step=1)["grad_norm"])
    return found, freed, sum(one.numel() for chunk in learner.chunks for one in chunk.parameters())


def test_a_learner_that_left_the_gpu_and_came_back_trains_on(tmp_path: Path) -> None:
    from reference_policy import write_model

    from pnpo_megatron.policy.process_groups import start_distributed

    start_distributed()
    folder = write_model(tmp_path / "hf")
    stayed, _, _ = norms(folder, leaves=False)
    left, freed, parameters = norms(folder, leaves=True)
    assert left == pytest.approx(stayed, rel=1e-5)
    assert freed >= 0.95 * 16 * parameters, "gradient, master weight and two moments of 4 bytes each"
