"""Bytes that a live learner holds, counted tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch

from pnpo_megatron.planning.shards import StateBytes


def measured_state(learner: Any) -> StateBytes:
    """Weights, gradient buffers, moments and float32 copies of one rank."""
    buffers = [buffer for chunk in learner.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    weights = sum(
        buffer.param_data.nbytes if buffer.param_data is not None else sum(p.nbytes for p in buffer.params)
        for buffer in buffers
    )
    gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
    theirs = {p.untyped_storage().data_ptr() for chunk in learner.chunks for p in chunk.parameters()}
    state = 0
    for part in learner.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                state += sum(x.nbytes for x in part.optimizer.state[main].values() if torch.is_tensor(x))
                state += main.nbytes if main.untyped_storage().data_ptr() not in theirs else 0
    return StateBytes(weights, gradients, state)
