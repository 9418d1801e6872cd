"""The distributed scan against exact integers: Python's, which share no code and cannot round."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pnpo_megatron.data.partition import Layout
from pnpo_megatron.parallel import prefix_scan as scan
from pnpo_megatron.parallel.cp_layout import local_index
from pnpo_megatron.parallel.prefix_scan import ratio_stats, suffix_scan

FIELDS = ("token", "prefix_sum", "response_sum", "preceding_min", "suffix_sum")
Response = list[tuple[float, float, bool]]
"""(policy log-prob, old log-prob, trained) of every slot of one whole sequence, unpadded."""


def padded_length(length: int, cp_size: int) -> int:
    return Layout(max_tokens=2**15, context_size=cp_size).pad(length)


def response(prompt: int, length: int, drift: float = 0.0, holes: bool = False, seed: int = 0) -> Response:
    """A prompt, then `length` trained tokens; holes leave out every third, as a tool's output would."""
    draw = torch.Generator().manual_seed(seed + 1000 * length + prompt)
    old = -2 * torch.rand(prompt + length, generator=draw)
    policy = old + drift + 0.05 * torch.randn(prompt + length, generator=draw)
    mask = [slot >= prompt and not (holes and slot % 3 == 0) for slot in range(prompt + length)]
    return list(zip(policy.tolist(), old.tolist(), mask, strict=True))


def poisoned(value: float, at: int) -> Response:
    slots = response(3, 30, seed=int(at))
    slots[3 + at] = (value, slots[3 + at][1], True)
    return slots


def batch() -> list[Response]:
    """Short ones, one on one rank, one with nothing to train, masked tokens in between, NaN and infinity."""
    return [
        *(response(5, length) for length in (1, 2, 3)),
        response(70, 2),
        response(9, 0),
        response(2, 45, holes=True),
        response(0, 17, drift=-0.4),
        poisoned(math.nan, 12),
        poisoned(-math.inf, 20),
        poisoned(math.inf, 2),
        response(11, 200),
    ]


def log_ratios(slots: Response) -> list[float]:
    """policy - old, subtracted in float32, 0 where nothing is trained."""
    policy, old, mask = (numpy.array(column) for column in zip(*slots, strict=True))
    difference = policy.astype(numpy.float32) - old.astype(numpy.float32)
    return [float(ratio) if trained else 0.0 for ratio, trained in zip(difference, mask, strict=True)]


def running_sums(ratios: list[float]) -> list[float]:
    """Inclusive, in whole steps of 2^-36; infinities and NaN by Python's own float rules."""
    sums, steps, special = [], 0, 0.0
    for ratio in ratios:
        if math.isfinite(ratio):
            steps += round(math.ldexp(ratio, 36))
        else:
            special += ratio
        sums.append(steps / 2**36 + special)
    return sums


def running_minima(ratios: list[float], mask: list[bool]) -> list[float]:
    """Exclusive, over trained slots; 0 where none comes before."""
    minima, least = [], math.inf
    for ratio, trained in zip(ratios, mask, strict=True):
        minima.append(0.0 if least == math.inf else least)
        if trained:
            least = math.nan if math.isnan(ratio) or math.isnan(least) else min(least, ratio)
    return minima


def steps_of(slots: Response) -> tuple[list[int], list[int]]:
    """t and L of every slot; 1 where nothing is trained."""
    trained = [mask for _, _, mask in slots]
    position = [t if mask else 1 for t, mask in zip(accumulate(trained), trained, strict=True)]
    length = sum(trained)
    return position, [length if mask else 1 for mask in trained]


def reference(slots: Response) -> dict[str, list[float]]:
    """Every field of every slot, by the definition."""
    ratios = log_ratios(slots)
    prefix = running_sums(ratios)
    return {
        "token": ratios,
        "prefix_sum": prefix,
        "response_sum": [prefix[-1]] * len(slots),
        "preceding_min": running_minima(ratios, [mask for _, _, mask in slots]),
        "suffix_sum": running_sums(ratios[::-1])[::-1],
    }


def pack(responses: list[Response], cp_size: int, cp_rank: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """([policy, old, mask, position, length] local, chunk lengths, index of the local slots)."""
    columns: list[list[float]] = [[], [], [], [], []]
    padded = [padded_length(len(slots), cp_size) for slots in responses]
    for slots, size in zip(responses, padded, strict=True):
        rows = [(*slot, t, length) for slot, t, length in zip(slots, *steps_of(slots), strict=True)]
        rows += [(math.nan, 3.0, False, 1, 1)] * (size - len(slots))  # padding may hold anything
        for column, values in zip(columns, zip(*rows, strict=True), strict=True):
            column.extend(values)
    chunks = torch.tensor(padded) // (2 * cp_size)
    here = local_index(chunks, cp_size, cp_rank)
    dtypes = (torch.float32, torch.float32, torch.bool, torch.int64, torch.int64)
    return [torch.tensor(c, dtype=d)[here] for c, d in zip(columns, dtypes, strict=True)], chunks, here


def scanned(responses: list[Response], cp_size: int, cp_rank: int, group: Any) -> dict[str, Tensor]:
    arrays, chunks, here = pack(responses, cp_size, cp_rank)
    policy = arrays[0].requires_grad_()
    stats = ratio_stats(policy, *arrays[1:], chunks, group)
    suffix, _ = suffix_scan(stats.token, chunks, group)
    found = {name: getattr(stats, name) for name in FIELDS if name != "suffix_sum"} | {"suffix_sum": suffix}
    assert not any(value.requires_grad for value in found.values())
    return {"here": here, **found}


def in_every_order() -> list[dict[str, Tensor]]:
    group, size, rank = (dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    return [scanned(order, size, rank, group) for order in (batch(), batch()[::-1])]


def long_one() -> dict[str, Tensor]:
    return scanned(
        [response(100, 15_360, drift=0.05)], dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    )


def whole(
    parts: list[dict[str, Tensor]], responses: list[Response], cp_size: int
) -> list[dict[str, list[float]]]:
    """The ranks' results joined and cut into responses, padding left out."""
    sizes = [padded_length(len(slots), cp_size) for slots in responses]
    joined = {}
    for name in FIELDS:
        joined[name] = torch.empty(sum(sizes), dtype=parts[0][name].dtype)
        for part in parts:
            joined[name][part["here"]] = part[name]
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [
        {name: values[start : start + len(slots)].tolist() for name, values in joined.items()}
        for start, slots in zip(starts, responses, strict=False)
    ]


def assert_same(found: dict[str, list[float]], slots: Response) -> None:
    """Bitwise, NaN for NaN, on the trained slots."""
    expected = reference(slots)
    for name in FIELDS:
        for slot, (ours, exact) in enumerate(zip(found[name], expected[name], strict=True)):
            if slots[slot][2]:
                assert ours == exact or (math.isnan(ours) and math.isnan(exact)), (name, slot, ours, exact)


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_h20_every_split_and_order_gives_the_exact_sums(spawn: Any, cp_size: int) -> None:
    orders = (batch(), batch()[::-1])
    results = spawn(in_every_order, cp_size)
    for number, order in enumerate(orders):
        parts = [rank[number] for rank in results]
        for found, slots in zip(whole(parts, order, cp_size), order, strict=True):
            assert_same(found, slots)


def test_one_process_needs_no_group() -> None:
    found = whole([scanned(batch(), 1, 0, None)], batch(), 1)
    for values, slots in zip(found, batch(), strict=True):
        assert_same(values, slots)


@pytest.mark.parametrize("cp_size", [1, 4])
def test_15360_tokens_with_drift_do_not_round_or_overflow(spawn: Any, cp_size: int) -> None:
    slots = response(100, 15_360, drift=0.05)
    found = whole(spawn(long_one, cp_size), [slots], cp_size)[0]
    assert_same(found, slots)
    assert 700 < found["prefix_sum"][-1] < 830  # exp of it passes float64's range


def test_h20_the_reference_vector() -> None:
    """Zigzag ranks that use only their own tokens get 0.997 and 1.0015 here, not 0.99925."""
    ratios = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, -0.6, -0.7, -0.8]) * 0.01
    mask, steps, length = torch.ones(8, dtype=torch.bool), torch.arange(1, 9), torch.full((8,), 8)
    chunks = torch.tensor([4])
    stats = ratio_stats(ratios, torch.zeros(8), mask, steps, length, chunks, None)
    prefix = (stats.prefix_sum / steps).exp()[[0, 1, 6, 7]]
    expected = torch.tensor([1.00100050, 1.00150113, 1.00028576, 0.99925028], dtype=torch.float64)
    torch.testing.assert_close(prefix, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close((stats.response_sum / 8).exp()[0], expected[3], rtol=0, atol=1e-8)


def bytes_sent() -> list[int]:
    """Bytes that this rank sends to each other one, without the prefix minimum and with it."""
    sizes: list[int] = []
    exchange = dist.all_to_all_single

    def counting(output: Tensor, parts: Tensor, **kwargs: Any) -> None:
        sizes.append(parts.numel() * parts.element_size() // dist.get_world_size())
        exchange(output, parts, **kwargs)

    arrays, chunks, _ = pack([response(4, 300), response(4, 20)], dist.get_world_size(), dist.get_rank())
    with (
        mock.patch.object(dist, "all_to_all_single", counting),
        mock.patch.object(dist, "all_gather_single", side_effect=AssertionError),
        mock.patch.object(dist, "all_reduce", side_effect=AssertionError),
    ):
        stats = ratio_stats(*arrays, chunks, dist.group.WORLD)
        assert stats.prefix_sum is not None
        sizes.append(-1)
        assert stats.preceding_min is not None
    return sizes


def test_the_scan_sends_two_numbers_a_sequence(spawn: Any) -> None:
    assert spawn(bytes_sent, 2) == [[2 * 2 * 8, -1, 2 * 2 * 4]] * 2


def test_a_sum_is_exact_where_another_response_of_the_pack_is_huge() -> None:
    values = torch.cat([torch.full((512,), 9e5), torch.full((8,), 1e-6)])
    prefix, totals = scan.prefix_scan(values, torch.tensor([256, 4]), None)
    assert totals[1] == running_sums([float(torch.tensor(1e-6))] * 8)[-1]
    assert prefix[-1] == totals[1]


def test_shapes_are_compared() -> None:
    flat = torch.zeros(4)
    ints = torch.ones(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="old_logprobs is \\[3\\]"):
        ratio_stats(flat, torch.zeros(3), ints.bool(), ints, ints, torch.tensor([2]), None)
