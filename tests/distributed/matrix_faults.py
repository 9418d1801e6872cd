"""Faults of the kind that reach such code, put in one at a time: the matrix must see each of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from matrix_cases import MATRIX, Fixture
from matrix_ranks import ALL, Run, difference_of, learner_of, one_update
from torch import Tensor

from pnpo_megatron.algorithm import objective
from pnpo_megatron.parallel import prefix_scan
from pnpo_megatron.policy import forward, learner
from pnpo_megatron.policy.loss_scale import LossScale
from pnpo_megatron.types import PackedBatch

_EARLIER_SUMS = prefix_scan.earlier_sums
_PREFIX_SCAN = prefix_scan.prefix_scan
_PRECEDING_MIN = prefix_scan.preceding_min
_RATIO_STATS = prefix_scan.ratio_stats
_TOKEN_TERMS = objective.token_terms


def _sums_of_own_chunks(sums: Tensor, special: Tensor | None, cp_group: Any) -> Any:
    offset, counted, _ = _EARLIER_SUMS(sums, special, None)
    return offset, counted, _EARLIER_SUMS(sums, special, cp_group)[2]


def local_chunk_prefix() -> Any:
    """The prefix mean adds up only what lies on this rank."""
    return patch.object(prefix_scan, "earlier_sums", _sums_of_own_chunks)


def local_minimum() -> Any:
    """The smallest earlier ratio is looked for on this rank only."""
    return patch.object(prefix_scan, "preceding_min", lambda *args: _PRECEDING_MIN(*args[:3], None))


@contextmanager
def gate_before_the_offset() -> Iterator[None]:
    """Weights are right, but tokens were accepted by the prefix before other ranks' chunks were added."""
    early: list[Any] = []

    def stats(*args: Any) -> Any:
        with local_chunk_prefix():
            early[:] = [_RATIO_STATS(*args)]
        return _RATIO_STATS(*args)

    def terms(chosen: Any, complete: Any, advantages: Tensor) -> Any:
        before = _TOKEN_TERMS(chosen, early[0], advantages)
        return replace(_TOKEN_TERMS(chosen, complete, advantages), below=before.below, above=before.above)

    with patch.object(learner, "ratio_stats", stats), patch.object(objective, "token_terms", terms):
        yield


def _packed(change: Callable[[PackedBatch], PackedBatch]) -> Any:
    pack = forward.pack
    return patch.object(forward, "pack", lambda *args: change(pack(*args)))


def labels_rolled_after_the_split() -> Any:
    """Every rank takes the next token of its own stream as the label."""
    return _packed(lambda packed: replace(packed, labels=packed.tokens.roll(-1)))


def mean_of_means() -> Any:
    """Every micro-batch of every rank is averaged by itself, then these means are averaged."""
    cut = learner.cut

    def averaged(mini_batch: Any, layout: Any, *rest: Any) -> Any:
        work = cut(mini_batch, layout, *rest)
        parts = layout.data_size * len(work.micro_batches)
        return replace(work, micro_batches=tuple(_with_own_mean(one, parts) for one in work.micro_batches))

    return patch.object(learner, "cut", averaged)


def _with_own_mean(micro_batch: Any, parts: int) -> Any:
    share = micro_batch.packed.loss_share
    own = share / (share.sum() * parts) if share.sum() > 0 else share
    return replace(micro_batch, packed=replace(micro_batch.packed, loss_share=own))


def loss_doubled_by_cp() -> Any:
    """The loss is multiplied by the context-parallel size, as code written for averaged gradients does."""
    scale = LossScale.__call__

    def doubled(self: LossScale, loss: Tensor, tokens: int) -> Any:
        scaled, count = scale(self, loss, tokens)
        return scaled * 2, count

    return patch.object(LossScale, "__call__", doubled)


def exclusive_scan() -> Any:
    """The token itself is left out of its prefix."""

    def exclusive(values: Tensor, chunk_lengths: Tensor, cp_group: Any) -> Any:
        prefix, total = _PREFIX_SCAN(values, chunk_lengths, cp_group)
        return prefix - values, total

    return patch.object(prefix_scan, "prefix_scan", exclusive)


def _chunk_starts(packed: PackedBatch) -> Tensor:
    """[T] slot at which each slot's chunk begins."""
    lengths = packed.chunk_lengths.repeat_interleave(2)
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def trained_position_reset_per_chunk() -> Any:
    """t counts trained tokens from the beginning of the chunk."""

    def reset(packed: PackedBatch) -> PackedBatch:
        counted = torch.cat([torch.zeros(1, dtype=torch.int64), packed.response_mask.cumsum(0)])
        position = counted[1:] - counted[_chunk_starts(packed)]
        return replace(packed, position=torch.where(packed.response_mask, position, 1))

    return _packed(reset)


def rotary_position_reset_per_chunk() -> Any:
    """Every chunk is rotated as if it were the first."""
    from pnpo_megatron.policy import rotary

    def first_chunk(cu_seqlens: Tensor, tokens: int, cp_size: int, cp_rank: int) -> Tensor:
        chunks = (cu_seqlens.diff() // (2 * cp_size)).tolist()
        return torch.cat([torch.arange(chunk).repeat(2) for chunk in chunks])

    return patch.object(rotary, "positions", first_chunk)


FAULTS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "local-chunk prefix": ("CP2", "pnpo", local_chunk_prefix),
    "local minimum": ("CP2", "minpro", local_minimum),
    "gate before the offset": ("CP2", "pnpo", gate_before_the_offset),
    "labels rolled after the split": ("CP2", "pnpo", labels_rolled_after_the_split),
    "mean of means": ("DP2", "pnpo", mean_of_means),
    "mean of token means": ("DP2", "grpo", mean_of_means),
    "loss doubled by CP": ("CP2", "pnpo", loss_doubled_by_cp),
    "exclusive scan": ("CP2", "pnpo", exclusive_scan),
    "position reset per chunk": ("CP2", "pnpo", trained_position_reset_per_chunk),
    "rotary position reset per chunk": ("CP2", "pnpo", rotary_position_reset_per_chunk),
}


def red_by_fault(stored: bytes) -> dict[str, list[str]]:
    """Fault -> what the matrix finds out of tolerance on this rank; "none ..." is the product as it is."""
    fixture: Fixture = pickle.loads(stored)["dense"]
    found = {}
    for layout in ("CP2", "DP2"):
        policy = learner_of(MATRIX[layout], fixture)
        for name in ("pnpo", "grpo", "minpro"):
            found[f"none {layout} {name}"] = _red(policy, fixture, name, nullcontext())
        for fault, (where, name, put_in) in FAULTS.items():
            if where == layout:
                found[fault] = _red(policy, fixture, name, put_in())
    return found


def _red(policy: Any, fixture: Fixture, name: str, fault: Any) -> list[str]:
    with fault:
        update = one_update(policy, fixture, Run(name, padded=False, sequences=ALL))
    return difference_of(update, fixture.answers[name]).red()
