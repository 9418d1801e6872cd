"""A learner that left its GPU and came back goes on as if it had not. On CPUs only the gradients move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import make_learner, random_sequences, share, with_old

from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.policy.optimizer import OptimizerSettings
from pnpo_megatron.types import TrainSequence


def run(folder: Path, sequences: list[TrainSequence], distributed: bool, leaves: bool) -> list[Any]:
    """What two updates give; with `leaves` the learner is away between them, and scores and exports so."""
    from pnpo_megatron.policy.offload import LearnerMemory

    optimizer = OptimizerSettings(lr=1e-2, warmup_steps=0, distributed=distributed)
    learner = make_learner(folder, optimizer=optimizer, dtype=torch.bfloat16)
    memory, found = LearnerMemory(learner), []
    rows = with_old(sequences, learner.log_probs(share(sequences, "response")))
    for _ in range(2):
        if leaves:
            memory.offload()
            buffers = [buffer.grad_data for chunk in learner.chunks for buffer in chunk.buffers]
            assert buffers and all(buffer.untyped_storage().size() == 0 for buffer in buffers)
        found.append(learner.log_probs(share(sequences, "response")))
        found.append({name: tensor.clone() for name, tensor in learner.export_hf()})
        if leaves:
            memory.reload()
        metrics = learner.update(
            share(rows, "response"), make_objective("pnpo", gate_low=0.9, gate_high=99.0), step=1
        )
        assert not metrics["update/skipped"]
        found.append(metrics["grad_norm"])
    return found


def both(folder: Path, sequences: list[TrainSequence]) -> tuple[list[Any], str]:
    from pnpo_megatron.policy.offload import LearnerMemory

    pairs = [[run(folder, sequences, distributed, leaves) for leaves in (False, True)]
             for distributed in (True, False)]  # fmt: skip
    for distributed in (True, False):
        optimizer = OptimizerSettings(distributed=distributed)
        with pytest.raises(ConfigError) as refused:
            LearnerMemory(make_learner(folder, optimizer=optimizer))
    return pairs, str(refused.value)


def test_a_learner_that_left_and_came_back_trains_on_bit_for_bit(spawn: Any, tmp_path: Path) -> None:
    from reference_policy import write_model

    [(pairs, refused)] = spawn(both, 1, write_model(tmp_path / "hf"), random_sequences(6, seed=1))
    for stayed, left in pairs:
        torch.testing.assert_close(left, stayed, atol=0, rtol=0)
        assert any(not torch.equal(one, stayed[1][name]) for name, one in stayed[-2].items()), "it trained"
    assert 'use "bfloat16"' in refused, "in float32 the optimizer has no copies that could leave"
