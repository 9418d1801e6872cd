"""Packed micro-batches made by hand, for tests of the model alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pnpo_megatron.types import PackedBatch


def pack(sequences: Sequence[Tensor], multiple: int = 1) -> PackedBatch:
    """Sequences end to end for one context-parallel rank, each padded to a multiple; labels are the next
    tokens."""
    padded = [torch.cat([ids, ids.new_zeros(-len(ids) % multiple)]) for ids in sequences]
    lengths = torch.tensor([len(ids) for ids in padded])
    tokens = torch.cat(padded)
    labels = torch.cat([torch.cat([ids[1:], ids.new_zeros(1)]) for ids in padded])
    mask = torch.cat([torch.arange(len(p)) < len(ids) - 1 for p, ids in zip(padded, sequences, strict=True)])
    count = len(tokens)
    return PackedBatch(
        tokens=tokens,
        labels=labels,
        position_ids=torch.cat([torch.arange(len(ids)) for ids in padded]),
        response_mask=mask,
        position=torch.ones(count, dtype=torch.int64),
        length=torch.ones(count, dtype=torch.int64),
        old_logprobs=torch.zeros(count),
        advantages=torch.zeros(count),
        loss_share=torch.zeros(count),
        cu_seqlens=torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32),
        chunk_lengths=lengths // 2,
        max_seqlen=int(lengths.max()),
        rows=tuple(range(len(padded))),
    )
