"""Core attention: packed, grouped queries, context parallelism; against a dense float64 softmax."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pnpo_megatron.errors import ConfigError
from pnpo_megatron.parallel.cp_layout import local_index
from pnpo_megatron.policy.cp_attention import (
    SdpaCoreAttention,
    packed_causal_attention,
)

HEADS, GROUPS, WIDTH, SCALE = 6, 2, 8, 0.3
PACKS = [[16], [8, 8, 8], [32, 8, 16, 8, 8], [80, 8, 400, 16], [48, 40, 56, 48, 40]]


def inputs(lengths: list[int]) -> list[Tensor]:
    """Query, key, value and the gradient of the output, of whole sequences in natural order."""
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, WIDTH), (HEADS, WIDTH)]
    return [torch.randn(sum(lengths), *shape, generator=generator) for shape in shapes]


def dense(lengths: list[int]) -> list[Tensor]:
    """Output and the three gradients, sequence by sequence, by the definition and in float64."""
    query, key, value, grad = (x.double() for x in inputs(lengths))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in leaves), strict=True):
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * SCALE
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        outputs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), v))
    out = torch.cat(outputs)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


def run(lengths: list[int], cp_size: int, cp_rank: int, group: Any) -> tuple[Tensor, list[Tensor]]:
    here = local_index(torch.tensor(lengths) // (2 * cp_size), cp_size, cp_rank)
    query, key, value, grad = (x[here] for x in inputs(lengths))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = packed_causal_attention(*leaves, lengths, SCALE, group)
    out.backward(grad)
    with torch.no_grad():
        again = packed_causal_attention(*leaves, lengths, SCALE, group)
    assert torch.equal(
        out, again
    )  # the same kernel with and without gradients: weights at update 1 are exactly 1
    return here, [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


def every_pack() -> list[tuple[Tensor, list[Tensor]]]:
    return [run(lengths, dist.get_world_size(), dist.get_rank(), dist.group.WORLD) for lengths in PACKS]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_packed_sequences_attend_as_each_does_alone_in_both_passes(spawn: Any, cp_size: int) -> None:
    results = spawn(every_pack, cp_size) if cp_size > 1 else [[run(p, 1, 0, None) for p in PACKS]]
    for number, lengths in enumerate(PACKS):
        for found, expected in zip(*join(results, number, lengths), strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


def join(results: list[Any], number: int, lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    expected = dense(lengths)
    found = [torch.full_like(x, torch.nan, dtype=torch.float32) for x in expected]
    for rank in results:
        here, values = rank[number]
        for whole, value in zip(found, values, strict=True):
            whole[here] = value
    return found, expected


def test_h13_another_sequence_of_the_pack_changes_nothing() -> None:
    query, key, value, _ = inputs([16, 24])
    before = packed_causal_attention(query, key, value, [16, 24], SCALE, None)
    for x in (query, key, value):
        x[16:] = 1e4
    after = packed_causal_attention(query, key, value, [16, 24], SCALE, None)
    assert torch.equal(before[:16], after[:16])


def core_attention(**changes: Any) -> SdpaCoreAttention:
    config = {
        "attention_dropout": 0.0,
        "window_size": None,
        "softmax_type": "vanilla",
        "kv_channels": WIDTH,
        "context_parallel_size": 1,
    }
    return SdpaCoreAttention(SimpleNamespace(**{**config, **changes}), 1, None, "self")


def test_many_short_sequences_share_a_call_and_a_long_one_is_not_padded_to() -> None:
    short = torch.randint(20, 61, (100,)).tolist()
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", wraps=sdpa) as calls:
        packed_causal_attention(*inputs(short)[:3], short, SCALE, None)
        assert calls.call_count <= 4
        alone, calls.call_count = calls.call_count, 0
        packed_causal_attention(*inputs([1000, *short])[:3], [1000, *short], SCALE, None)
        assert calls.call_count == alone + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"attention_dropout": 0.1}, "attention_dropout = 0.1"), ({"window_size": (4, 0)}, "window_size")],
)
def test_what_is_not_plain_causal_attention_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        core_attention(**changes)


def test_lengths_that_do_not_fill_the_tokens_are_refused() -> None:
    query, key, value, _ = inputs([16])
    with pytest.raises(ValueError, match="16 tokens on each of 1 .* lengths \\[8, 4\\]"):
        packed_causal_attention(query, key, value, [8, 4], SCALE, None)
