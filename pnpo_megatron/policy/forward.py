"""A mini-batch cut into micro-batches, and these through the model with Megatron's schedules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from pnpo_megatron.data.packing import FlatTokens, flatten, label_index, pack, to_device
from pnpo_megatron.data.partition import Layout, Plan, plan_micro_batches
from pnpo_megatron.parallel.cp_layout import local_index
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.policy.model import hidden_states
from pnpo_megatron.policy.routing import Routing
from pnpo_megatron.types import MiniBatch, PackedBatch


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch on its device, and where its trained tokens are."""

    packed: PackedBatch
    slots: Tensor
    """[n] int64, on the device: slots of this rank that predict a trained token."""
    places: Tensor
    """[n] int64, on the device: the same tokens' places in the flat mini-batch."""

    def spread(self, values: Tensor) -> Tensor:
        """[n] values of trained tokens -> [T], 0 elsewhere; differentiable."""
        return torch.zeros(self.packed.tokens.shape, dtype=values.dtype, device=values.device).scatter(
            0, self.slots, values
        )


@dataclass(frozen=True)
class Work:
    """A mini-batch cut for this rank."""

    flat: FlatTokens
    micro_batches: tuple[MicroBatch, ...]
    all_tokens: tuple[int, ...]
    """T of every micro-batch of every data-parallel rank."""


def layout_of(groups: ParallelGroups, *, max_tokens: int, padded: bool, virtual_stages: int) -> Layout:
    """The packing that the process groups call for."""
    return Layout(
        max_tokens=max_tokens,
        data_size=groups.dp_size,
        context_size=groups.cp_size,
        tensor_size=groups.tp_size,
        count_multiple=groups.pp_size if virtual_stages > 1 else 1,
        padded=padded,
    )


def cut(mini_batch: MiniBatch, layout: Layout, groups: ParallelGroups, device: torch.device) -> Work:
    """This rank's micro-batches; every rank computes the same plan, from lengths only."""
    lengths = [len(sequence.ids) for sequence in mini_batch.sequences]
    plan = plan_micro_batches(lengths, layout)
    flat = flatten(mini_batch)
    slots = partial(local_index, cp_size=groups.cp_size, cp_rank=groups.cp_rank)
    packs = [pack(flat, rows, layout, slots) for rows in plan[groups.dp_rank]]
    return Work(
        flat=flat,
        micro_batches=tuple(_micro_batch(packed, flat, device) for packed in packs),
        all_tokens=_tokens_per_rank(lengths, plan, layout),
    )


def _micro_batch(packed: PackedBatch, flat: FlatTokens, device: torch.device) -> MicroBatch:
    # Indices are taken on the host: finding them on a GPU would wait for it in every micro-batch.
    slots = packed.response_mask.nonzero().flatten()
    places = label_index(packed, flat)[slots]
    return MicroBatch(to_device(packed, device), slots.to(device), places.to(device))


def _tokens_per_rank(lengths: Sequence[int], plan: Plan, layout: Layout) -> tuple[int, ...]:
    tokens = []
    for rows in (rows for rank in plan for rows in rank):
        sizes = [layout.pad(lengths[row]) for row in rows] or [layout.multiple]
        whole = max(sizes) * len(sizes) if layout.padded else sum(sizes)
        tokens.append(whole // layout.context_size)
    return tuple(tokens)


def run_schedule(
    chunks: Sequence[Any],
    work: Work,
    groups: ParallelGroups,
    last_stage: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Any]],
    routing: Routing,
    *,
    forward_only: bool,
) -> list[Any]:
    """All micro-batches through Megatron's schedule for this layout: none, 1F1B or interleaved.

    Args:
        work: micro-batches, as many on every rank.
        last_stage: micro-batch and hidden states -> (loss, token count, anything), on the last stage only.
        routing: the routers of a mixture of experts, which learn which micro-batch is on its way.
        forward_only: no backward pass and no autograd graph.

    Returns:
        What `last_stage` gave as its third value, one a micro-batch; nothing on the other stages.
    """

    def step(batches: Iterator[MicroBatch], chunk: Any, *_: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro_batch = next(batches)
        index = next(at for at, one in enumerate(chunks) if one is chunk)
        routing.before(index, micro_batch.packed, work.flat)
        hidden = hidden_states(chunk, micro_batch.packed)
        routing.after(index, micro_batch.packed)
        return hidden, partial(last_stage, micro_batch)

    schedule = get_forward_backward_func(
        pp_size=groups.pp_size, vp_size=len(chunks) if len(chunks) > 1 else None
    )
    results: list[Any] = schedule(
        forward_step_func=step,
        data_iterator=[iter(work.micro_batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(work.micro_batches),
        seq_length=max(len(micro_batch.packed.tokens) for micro_batch in work.micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results
