"""Loss, metrics and gradient of a linear toy policy do not change with the split (TRAPS H18, H20, H37)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pnpo_megatron.algorithm.objective import policy_loss
from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.data.packing import flatten, label_index, pack
from pnpo_megatron.data.partition import Layout, plan_micro_batches
from pnpo_megatron.parallel.cp_layout import local_index
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.parallel.prefix_scan import ratio_stats
from pnpo_megatron.parallel.reduce import max_over, sum_over
from pnpo_megatron.types import MiniBatch, TrainSequence

LOW, HIGH = 0.006, 0.008
# (prompt, response) tokens; two tokens lie on one rank, and five sequences leave ranks of DP4 short.
SHAPES = [(3, 20), (30, 2), (4, 41), (5, 1), (2, 0)]
WIDTH = 6


def problem() -> tuple[MiniBatch, Tensor, Tensor]:
    """A mini-batch, a feature vector per token of it laid end to end, and the policy's parameters."""
    draw = torch.Generator().manual_seed(3)
    sequences, shares = [], []
    for number, (prompt, length) in enumerate(SHAPES):
        mask = torch.arange(prompt + length) >= prompt
        zeros = torch.zeros(prompt + length)
        advantage = (-1.0) ** number * (1 + number)
        ids = torch.arange(prompt + length)
        sequences.append(TrainSequence(ids, mask, zeros, advantage, old_logprobs=zeros))
        shares.append(1 / (4 * length) if length else 0.0)
    features = 0.05 * torch.randn(sum(len(s.ids) for s in sequences), WIDTH, generator=draw)
    parameters = torch.randn(WIDTH, generator=draw)
    return MiniBatch(tuple(sequences), tuple(shares), tuple(range(len(sequences)))), features, parameters


def reference() -> dict[str, Any]:
    """Eq. 7-11 sequence by sequence in float64 numpy; the old policy's log-probs are all 0."""
    mini_batch, features, parameters = problem()
    weights = parameters.double().numpy()
    loss, rejected, extremes, gradient, start = 0.0, 0, [], numpy.zeros(WIDTH), 0
    for sequence, share in zip(mini_batch.sequences, mini_batch.loss_share, strict=True):
        here = features[start : start + len(sequence.ids)][sequence.response_mask].double().numpy()
        start += len(sequence.ids)
        logprobs = here @ weights
        t = numpy.arange(1, len(here) + 1)
        weight = numpy.exp(numpy.cumsum(logprobs) / t)
        width = numpy.sqrt(len(here) / t)
        keep = (weight >= 1 - LOW * width) & (weight <= 1 + HIGH * width)
        slope = -1.0 * keep * weight * sequence.advantage * share
        loss += slope @ logprobs
        gradient += slope @ here
        rejected += int((~keep).sum())
        extremes += weight.tolist()
    return {
        "loss": loss,
        "rejected": rejected,
        "min": min(extremes),
        "max": max(extremes),
        "gradient": torch.tensor(gradient),
    }


def train(groups: ParallelGroups, max_tokens: int) -> dict[str, Any]:
    mini_batch, features, parameters = problem()
    parameters.requires_grad_()
    layout = Layout(max_tokens=max_tokens, data_size=groups.dp_size, context_size=groups.cp_size)
    plan = plan_micro_batches([len(s.ids) for s in mini_batch.sequences], layout)
    flat = flatten(mini_batch)
    slots = partial(local_index, cp_size=groups.cp_size, cp_rank=groups.cp_rank)
    objective = make_objective("pnpo", gate_low=LOW, gate_high=HIGH)
    sums, low, high = torch.zeros(2, dtype=torch.float64), torch.tensor(torch.inf), torch.tensor(-torch.inf)
    for rows in plan[groups.dp_rank]:
        packed = pack(flat, rows, layout, slots)
        place = label_index(packed, flat).clamp(max=len(features) - 1)
        logprobs = features[place] @ parameters
        stats = ratio_stats(
            logprobs,
            packed.old_logprobs,
            packed.response_mask,
            packed.position,
            packed.length,
            packed.chunk_lengths,
            groups.cp,
        )
        loss, terms = policy_loss(objective, logprobs, stats, packed.advantages, packed.loss_share)
        loss.backward()
        trained = terms.weight[packed.response_mask]
        sums += torch.stack([loss.detach(), (~terms.keep & packed.response_mask).sum()])
        if trained.numel():
            low, high = torch.minimum(low, trained.min()), torch.maximum(high, trained.max())
    gradient = torch.zeros(WIDTH) if parameters.grad is None else parameters.grad
    loss, rejected = sum_over(sums, groups.dp_cp).tolist()
    return {
        "loss": loss,
        "rejected": rejected,
        "min": -float(max_over(-low, groups.dp_cp)),
        "max": float(max_over(high, groups.dp_cp)),
        "gradient": sum_over(gradient, groups.dp_cp),
    }


def every_split() -> dict[str, dict[str, Any]]:
    """DP4, DP2 x CP2 and CP4 of the same four ranks, each with small micro-batches and with large ones."""
    rank, world = dist.get_rank(), ParallelGroups(dp_cp=dist.group.WORLD)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    splits = {
        "DP4": replace(world, dp=dist.group.WORLD),
        "DP2xCP2": replace(world, cp=pairs[rank // 2], dp=columns[rank % 2]),
        "CP4": replace(world, cp=dist.group.WORLD),
    }
    return {
        f"{name} {tokens}": train(split, tokens) for name, split in splits.items() for tokens in (48, 256)
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    assert found["rejected"] == expected["rejected"], name
    for key in ("loss", "min", "max"):
        assert found[key] == pytest.approx(expected[key], rel=2e-6), (name, key)
    difference = (found["gradient"] - expected["gradient"]).norm() / expected["gradient"].norm()
    assert difference < 5e-6, name


def test_h18_h20_h37_every_split_gives_the_loss_metrics_and_gradient_of_one_process(spawn: Any) -> None:
    expected = reference()
    assert 10 < expected["rejected"] < 50  # the gate has work to do on both sides
    assert_same(train(ParallelGroups(), 256), expected, "one process")
    for rank in spawn(every_split, 4):
        for name, found in rank.items():
            assert_same(found, expected, name)
