"""Run folders made up from noise, in the formats that a real run writes."""

from __future__ import annotations

import torch
from torch import Tensor

from pnpo_megatron.types import MiniBatch, TrainSequence


def noisy_mini_batch(
    lengths: list[int], *, sigma: float, centred: bool, generator: torch.Generator
) -> tuple[MiniBatch, list[Tensor]]:
    """Responses after a prompt of 3 tokens, and policy log-probs with log rho ~ N(0 or -sigma^2/2, sigma)."""
    sequences, policy = [], []
    for index, length in enumerate(lengths):
        mask = torch.zeros(3 + length, dtype=torch.bool)
        mask[3:] = True
        old = torch.where(mask, -torch.rand(3 + length, generator=generator) * 3, 0.0)
        drift = 0.0 if centred else -(sigma**2) / 2
        noise = drift + sigma * torch.randn(3 + length, generator=generator)
        advantage = (1.0, -1.0, 0.0)[index % 3]
        zeros = torch.zeros(3 + length)
        sequences.append(TrainSequence(zeros.long(), mask, zeros, advantage, old))
        policy.append(torch.where(mask, old + noise, 0.0))
    share = tuple(1.0 / (length * len(lengths)) for length in lengths)
    return MiniBatch(tuple(sequences), share, tuple(range(len(lengths)))), policy


def dumped_by_hand(
    mini_batch: MiniBatch, policy: list[Tensor], gate_low: float, gate_high: float
) -> dict[str, list[Tensor]]:
    """What the learner hands out for PNPO, written as plain loops over responses."""
    columns: dict[str, list[Tensor]] = {"policy_logprobs": policy, "log_weight": [], "keep": []}
    for sequence, logprobs in zip(mini_batch.sequences, policy, strict=True):
        mask = sequence.response_mask
        log_ratio = (logprobs - sequence.old_logprobs)[mask].double()
        t = torch.arange(1, len(log_ratio) + 1, dtype=torch.float64)
        log_weight = torch.zeros(len(mask), dtype=torch.float64)
        log_weight[mask] = log_ratio.cumsum(0) / t
        scale = torch.ones(len(mask), dtype=torch.float64)
        scale[mask] = (len(log_ratio) / t).sqrt()
        weight = log_weight.exp()
        columns["log_weight"].append(log_weight.float())
        columns["keep"].append(((weight >= 1 - gate_low * scale) & (weight <= 1 + gate_high * scale)).float())
    return columns


def noisy_responses(
    count: int, length: int, *, sigma: float, centred: bool, generator: torch.Generator
) -> Tensor:
    """[count, length] float64 log-ratios of independent tokens: mean 0, or E[rho] = 1."""
    drift = 0.0 if centred else -(sigma**2) / 2
    return drift + sigma * torch.randn(count, length, generator=generator, dtype=torch.float64)


def flat_arrays(groups: list[Tensor]) -> dict[str, Tensor]:
    """Token arrays of responses whose log-ratios are the rows of each [count, length] group."""
    ratios = torch.cat([group.flatten() for group in groups])
    position = [torch.arange(1, group.shape[1] + 1).repeat(group.shape[0]) for group in groups]
    length = [torch.full((group.numel(),), group.shape[1]) for group in groups]
    zeros = torch.zeros(len(ratios))
    starts = torch.cat(position) == 1
    return {
        "policy_logprobs": ratios.float(), "old_logprobs": zeros, "log_weight": zeros,
        "keep": zeros.to(torch.uint8), "advantages": zeros, "row": starts.cumsum(0) - 1,
        "position": torch.cat(position).int(), "length": torch.cat(length).int(),
    }  # fmt: skip


def counted_acceptance(groups: list[Tensor], gate_low: float, gate_high: float) -> float:
    """Mean over responses of the share of their tokens within Eq. 9, by powers of products."""
    shares = []
    for log_ratios in groups:
        t = torch.arange(1, log_ratios.shape[1] + 1, dtype=torch.float64)
        weight, scale = log_ratios.exp().cumprod(1) ** (1 / t), (log_ratios.shape[1] / t).sqrt()
        kept = (weight >= 1 - gate_low * scale) & (weight <= 1 + gate_high * scale)
        shares.append(kept.double().mean(1))
    return float(torch.cat(shares).mean())
