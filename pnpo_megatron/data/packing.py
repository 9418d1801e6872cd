"""Sequences to packed micro-batches on one context-parallel rank, built without a loop over tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from pnpo_megatron.data.partition import Layout
from pnpo_megatron.types import MiniBatch, PackedBatch

LocalSlots = Callable[[Tensor], Tensor]
"""[S] chunk lengths -> slots of the whole sequences, laid end to end, that this rank holds, in its order."""


@dataclass(frozen=True)
class FlatTokens:
    """A mini-batch laid end to end without padding, token-aligned: built once, cut into micro-batches."""

    ids: Tensor
    """[N] int64."""
    mask: Tensor
    """[N] bool."""
    old_logprobs: Tensor
    """[N] float32, 0 off the mask and where none are known yet."""
    correction: Tensor
    """[N] float32 factors of the loss; 1 where there is none."""
    starts: Tensor
    """[B+1] int64: where each sequence begins; the last entry is N."""
    trained: Tensor
    """[B] int64: L of each sequence."""
    advantages: Tensor
    """[B] float32."""
    loss_share: Tensor
    """[B] float32."""


def flatten(mini_batch: MiniBatch) -> FlatTokens:
    """Join a mini-batch's sequences. What stands off the mask, NaN included, is replaced by 0 (TRAPS H10)."""
    sequences = mini_batch.sequences
    mask = torch.cat([sequence.response_mask for sequence in sequences])
    old = torch.cat(
        [
            torch.zeros(len(sequence.ids)) if sequence.old_logprobs is None else sequence.old_logprobs
            for sequence in sequences
        ]
    ).float()
    correction = torch.cat(
        [
            torch.ones(len(sequence.ids)) if sequence.correction is None else sequence.correction
            for sequence in sequences
        ]
    )
    lengths = torch.tensor([len(sequence.ids) for sequence in sequences])
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    counted = torch.cat([starts.new_zeros(1), mask.cumsum(0)])
    return FlatTokens(
        ids=torch.cat([sequence.ids for sequence in sequences]),
        mask=mask,
        old_logprobs=torch.where(mask, old, 0.0),
        correction=correction,
        starts=starts,
        trained=counted[starts[1:]] - counted[starts[:-1]],
        advantages=torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float32),
        loss_share=torch.tensor(mini_batch.loss_share, dtype=torch.float32),
    )


def pack(flat: FlatTokens, rows: Sequence[int], layout: Layout, local_slots: LocalSlots) -> PackedBatch:
    """One micro-batch on one context-parallel rank.

    Labels and masks are shifted inside each whole sequence before anything is split, so no slot predicts a
    token of another sequence or rank (TRAPS H13). No rows: one dummy sequence with share 0, which keeps
    collectives in step.

    Args:
        flat: the mini-batch, from `flatten`.
        rows: its sequences in this micro-batch.
        local_slots: the zigzag index of this rank, from [S] chunk lengths.
    """
    row = torch.tensor(rows or [0])
    starts, lengths = flat.starts[row], flat.starts[row + 1] - flat.starts[row]
    if not rows:
        lengths = torch.zeros_like(lengths)
    padded = torch.clamp(-(-lengths // layout.multiple), min=1) * layout.multiple
    if layout.padded:
        padded = padded.max().expand_as(padded)
    cu_seqlens = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    chunk_lengths = padded // (2 * layout.context_size)

    sequence = torch.repeat_interleave(torch.arange(len(row)), padded)
    position_ids = torch.arange(int(cu_seqlens[-1])) - cu_seqlens[sequence]
    is_token, has_label = position_ids < lengths[sequence], position_ids + 1 < lengths[sequence]
    token = torch.where(is_token, starts[sequence] + position_ids, 0)
    label = torch.where(has_label, token + 1, 0)
    mask = has_label & flat.mask[label]
    counted = mask.cumsum(0)
    before = torch.cat([counted.new_zeros(1), counted])[cu_seqlens[sequence]]

    whole = {
        "tokens": torch.where(is_token, flat.ids[token], 0),
        "labels": torch.where(has_label, flat.ids[label], 0),
        "position_ids": position_ids,
        "response_mask": mask,
        "position": torch.where(mask, counted - before, 1),
        "length": torch.where(mask, flat.trained[row][sequence], 1),
        "old_logprobs": torch.where(mask, flat.old_logprobs[label], 0.0),
        "advantages": torch.where(mask, flat.advantages[row][sequence] * flat.correction[label], 0.0),
        "loss_share": torch.where(mask, flat.loss_share[row][sequence], 0.0),
    }
    here = local_slots(chunk_lengths)
    return PackedBatch(
        **{name: value[here] for name, value in whole.items()},
        cu_seqlens=cu_seqlens.to(torch.int32),
        chunk_lengths=chunk_lengths,
        max_seqlen=int(padded.max()),
        rows=tuple(rows) or (-1,),
    )


def to_device(packed: PackedBatch, device: torch.device) -> PackedBatch:
    """The same micro-batch with its tensors on `device`."""
    moved: dict[str, Any] = {
        field.name: value.to(device, non_blocking=True)
        for field in fields(packed)
        if isinstance(value := getattr(packed, field.name), Tensor)
    }
    return replace(packed, **moved)


def label_index(packed: PackedBatch, flat: FlatTokens) -> Tensor:
    """[T] int64: place in the flat mini-batch of the token each slot predicts; meaningful on the mask only.

    Both arguments live on the host.
    """
    starts = flat.starts[torch.tensor(packed.rows).clamp(min=0)]
    return torch.repeat_interleave(starts, 2 * packed.chunk_lengths) + packed.position_ids + 1
