"""One rollout batch: sample, grade while the rest still generates, group-relative advantages (Eq. 10)."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from pnpo_megatron.algorithm.advantages import group_relative
from pnpo_megatron.errors import RewardFaultError, RolloutError
from pnpo_megatron.seeds import derive_seed
from pnpo_megatron.types import (
    Grade,
    Prompt,
    RewardInput,
    RewardResult,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    Sampler,
    Sampling,
    SequenceRecord,
    TrainSequence,
    token_aligned,
)

MAX_REFILLS = 3
Std = Literal["population", "sample", "none"]


@dataclass(frozen=True)
class CollectSettings:
    """Numbers of one rollout batch."""

    prompts: int
    group_size: int
    sampling: Sampling
    seed: int
    advantage_std: Std = "population"
    permute_rewards: bool = False
    max_fault_rate: float = 0.01


def collect(
    step: int,
    settings: CollectSettings,
    take: Callable[[int, Collection[str]], list[Prompt]],
    sampler: Sampler,
    grade: Grade,
) -> tuple[RolloutBatch, dict[str, float]]:
    """Sample and grade the batch of `step`. Runs on one rank.

    Args:
        take: the next n prompts of the order, none with an id given. A prompt that fails is replaced (P never
            changes), at most `MAX_REFILLS` times.

    Returns:
        The batch in prompt order, without old log-probs, and its step-level metrics.

    Raises:
        RolloutError: prompts, and those taken in their place, came back without responses.
        RewardFaultError: more than `max_fault_rate` of the rewards could not be computed.
    """
    prompts = take(settings.prompts, ())
    start = perf_counter()
    groups: dict[str, RolloutGroup] = {}
    waiting: dict[str, Callable[[], list[RewardResult]]] = {}
    seed = (settings.seed, "rollout", step)
    for refills_left in reversed(range(MAX_REFILLS + 1)):
        asked = [prompt for prompt in prompts if prompt.id not in groups]
        for group in sampler.generate(asked, settings.group_size, settings.sampling, seed):
            groups[group.prompt.id] = group
            waiting[group.prompt.id] = grade([_reward_input(group.prompt, one) for one in group.rollouts])
        failed = [prompt.id for prompt in prompts if prompt.id not in groups]
        if not failed:
            break
        if not refills_left:
            raise RolloutError(
                f"step {step}: {len(failed)} prompts gave no responses, first {failed[0]!r}, after "
                f"{MAX_REFILLS} rounds of other prompts; the engine's log in the run folder says why"
            )
        others = iter(take(len(failed), [prompt.id for prompt in prompts]))
        prompts = [prompt if prompt.id in groups else next(others) for prompt in prompts]
    generated = perf_counter()
    results = [waiting[prompt.id]() for prompt in prompts]
    graded = perf_counter()
    if settings.permute_rewards:
        results = [
            _permuted(group, derive_seed(settings.seed, "permute", step, index))
            for index, group in enumerate(results)
        ]
    batch = _assemble(step, [groups[prompt.id] for prompt in prompts], results, settings.advantage_std)
    metrics = _metrics(batch, results, settings.max_fault_rate)
    return batch, metrics | {"time/generate_s": generated - start, "time/reward_s": graded - generated}


def probe(
    step: int, prompts: Sequence[Prompt], sampler: Sampler, sampling: Sampling, seed: tuple[int | str, ...]
) -> RolloutBatch:
    """A few fresh responses, not graded, for learner and engine to score alike. Runs on one rank."""
    groups = list(sampler.generate(prompts, 1, sampling, seed))
    return _assemble(step, groups, [[RewardResult(0.0)] for _ in groups], "population")


def _reward_input(prompt: Prompt, rollout: Rollout) -> RewardInput:
    return RewardInput(
        prompt=prompt.text,
        answer=prompt.answer,
        text=rollout.text,
        finish_reason=rollout.finish_reason,
        reasoning_open=prompt.reasoning_open,
        meta=prompt.meta,
    )


def _permuted(results: list[RewardResult], seed: int) -> list[RewardResult]:
    shuffled = list(results)
    random.Random(seed).shuffle(shuffled)
    return shuffled


def _assemble(
    step: int, groups: list[RolloutGroup], results: list[list[RewardResult]], std: Std
) -> RolloutBatch:
    rewards = torch.tensor(
        [[float("nan") if r.value is None else r.value for r in group] for group in results],
        dtype=torch.float64,
    )
    advantages = group_relative(rewards, std=std).tolist()
    sequences, records = [], []
    for index, (group, graded) in enumerate(zip(groups, results, strict=True)):
        for rollout, result, advantage in zip(group.rollouts, graded, advantages[index], strict=True):
            sequences.append(_sequence(group.prompt, rollout, advantage))
            records.append(
                SequenceRecord(
                    prompt_id=group.prompt.id,
                    group=index,
                    sample=rollout.sample,
                    seed=rollout.seed,
                    version=rollout.version,
                    finish_reason=rollout.finish_reason,
                    reward=result.value,
                    truncated=rollout.truncated,
                    text=rollout.text,
                )
            )
    return RolloutBatch(step, tuple(sequences), tuple(records), tuple(record.group for record in records))


def _sequence(prompt: Prompt, rollout: Rollout, advantage: float) -> TrainSequence:
    ids = torch.cat([torch.tensor(prompt.token_ids), rollout.response_ids])
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[len(prompt.token_ids) :] = True
    return TrainSequence(ids, mask, token_aligned(rollout.rollout_logprobs, mask), advantage)


def _metrics(
    batch: RolloutBatch, results: list[list[RewardResult]], max_fault_rate: float
) -> dict[str, float]:
    flat = [result for group in results for result in group]
    faults = [result for result in flat if result.value is None]
    if len(faults) > max_fault_rate * len(flat):
        raise RewardFaultError(
            f"step {batch.step}: {len(faults)} of {len(flat)} rewards could not be computed, over "
            f"reward.max_fault_rate = {max_fault_rate}; first: {faults[0].fault}"
        )
    values = torch.tensor([result.value for result in flat if result.value is not None], dtype=torch.float64)
    lengths = torch.tensor([sequence.length for sequence in batch.sequences], dtype=torch.float64)
    return {
        "reward/mean": _mean(values),
        "reward/mixed_groups": sum(len({r.value for r in group}) > 1 for group in results) / len(results),
        "reward/faults": float(len(faults)),
        "reward/timeouts": float(sum(result.timed_out for result in flat)),
        "response/length_mean": _mean(lengths),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": sum(record.truncated for record in batch.records) / len(batch.records),
    }


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
