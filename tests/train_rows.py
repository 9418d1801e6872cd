"""Small training sequences, made by hand or by seed."""

from __future__ import annotations

import torch

from pnpo_megatron.types import RolloutBatch, SequenceRecord, TrainSequence


def sequence(
    prompt: int, mask: list[bool], *, seed: int, advantage: float = 1.0, old: bool = True
) -> TrainSequence:
    """`prompt` random tokens, then one response token per entry of `mask`."""
    generator = torch.Generator().manual_seed(seed)
    total = prompt + len(mask)
    response_mask = torch.tensor([False] * prompt + mask, dtype=torch.bool)
    logprobs = -torch.rand(2, total, generator=generator)
    logprobs = torch.where(response_mask, logprobs, torch.zeros(()))
    return TrainSequence(
        ids=torch.randint(1, 90, (total,), generator=generator),
        response_mask=response_mask,
        rollout_logprobs=logprobs[0],
        advantage=advantage,
        old_logprobs=logprobs[1] if old else None,
    )


def rollout_batch(groups: int, group_size: int) -> RolloutBatch:
    """Groups listed out of order in `groups`, so that reshaping would mix them."""
    numbers = tuple(group for _ in range(group_size) for group in range(groups))
    sequences = tuple(
        sequence(2 + row % 3, [True] * (1 + row % 4), seed=row, advantage=float(row))
        for row in range(len(numbers))
    )
    records = tuple(
        SequenceRecord(f"p{group}", group, row // groups, row, 0, "stop", 1.0, False, "")
        for row, group in enumerate(numbers)
    )
    return RolloutBatch(1, sequences, records, numbers)
