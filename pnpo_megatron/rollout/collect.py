"""One rollout batch: sample, grade while the rest still generates, group-relative advantages (Eq. 10)."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal, TypeAlias

import torch

from pnpo_megatron.algorithm.advantages import group_relative
from pnpo_megatron.errors import NoResponsesError, RewardFaultError, RolloutError
from pnpo_megatron.seeds import derive_seed
from pnpo_megatron.types import (
    Grade,
    Prompt,
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

Std = Literal["population", "sample", "none"]
Tell: TypeAlias = Callable[[tuple[int, Sequence[TrainSequence]] | None], None]
"""Takes a group's place in the batch and its sequences as soon as it is sampled, and None when all are."""


@dataclass(frozen=True)
class Overlong:
    """What becomes of responses near or at the length limit."""

    rule: Literal["keep", "mask", "penalty"] = "keep"
    """keep: as they are. mask: a truncated response is graded, and its reward stays in the statistics of its
    group, but none of its tokens is trained. penalty: DAPO's soft one is added to the reward."""
    buffer: int = 0
    """Tokens before the limit over which the penalty grows from 0 to `factor`."""
    factor: float = 1.0

    def penalty(self, length: int, limit: int) -> float:
        """Soft overlong punishment, DAPO Eq. 13 (arXiv 2503.14476): 0 up to limit - buffer, then linear."""
        if self.rule != "penalty":
            return 0.0
        return -self.factor * min(max(length - (limit - self.buffer), 0) / self.buffer, 1.0)


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
    dynamic: bool = False
    """Groups whose graded rewards are all equal teach nothing: replace them by other prompts' (DAPO)."""
    max_refills: int = 3
    """Rounds of other prompts in place of failed or dropped ones."""
    overlong: Overlong = Overlong()


_Waiting: TypeAlias = tuple[RolloutGroup, Callable[[], list[RewardResult]]]


@dataclass
class _Graded:
    group: RolloutGroup
    results: list[RewardResult]

    @property
    def is_mixed(self) -> bool:
        return len({result.value for result in self.results if result.value is not None}) > 1


def collect(
    step: int,
    settings: CollectSettings,
    take: Callable[[int, Collection[str]], list[Prompt]],
    sampler: Sampler,
    grade: Grade,
    tell: Tell | None = None,
) -> tuple[RolloutBatch, dict[str, float]]:
    """Sample and grade the batch of `step`. Runs on one rank.

    Args:
        take: the next n prompts of the order. With ids given, none of these, and fewer if there are no more.
        tell: told of every group, without advantages; its place may still go to another prompt.

    A prompt that fails, or whose group is dropped by dynamic sampling, is replaced, at most `max_refills`
    times over; then dropped groups fill the places that are left. P never changes.

    Returns:
        The batch in prompt order, without old log-probs, and its step-level metrics.

    Raises:
        RolloutError: prompts, and those taken in their place, came back without responses.
        RewardFaultError: more than `max_fault_rate` of the rewards could not be computed.
    """
    start = perf_counter()
    places: list[_Graded | None] = [None] * settings.prompts
    dropped: list[_Graded] = []
    tried: set[str] = set()
    waited, rounds = 0.0, 0
    prompts = take(settings.prompts, ())
    while prompts:
        tried |= {prompt.id for prompt in prompts}
        free = [place for place, one in enumerate(places) if one is None]
        waiting = _sampled(step, settings, prompts, sampler, grade)
        if tell:
            home = {prompt.id: place for place, prompt in zip(free, prompts, strict=False)}
            waiting = _told(waiting, home, settings, tell)
        done, seconds = _graded(waiting)
        waited, rounds = waited + seconds, rounds + 1
        for place, prompt in zip(free, prompts, strict=False):
            one = done.get(prompt.id)
            if one and settings.dynamic and not one.is_mixed:
                dropped.append(one)
            else:
                places[place] = one
        missing = places.count(None)
        prompts = take(missing, tried) if missing and rounds <= settings.max_refills else []
    fillers = iter(dropped)
    filled = [one or next(fillers, None) for one in places]
    kept = [one for one in filled if one is not None]
    if len(kept) < settings.prompts:
        failed = sorted(tried - {one.group.prompt.id for one in kept})
        raise RolloutError(
            f"step {step}: {settings.prompts - len(kept)} prompts gave no responses, first {failed[0]!r}, "
            f"after {rounds - 1} rounds of other prompts; the engine's log in the run folder says why"
        )
    sampled = [*kept, *fillers]
    metrics = _metrics(step, settings, kept, sampled) | {
        "rollout/refills": float(rounds - 1),
        "rollout/dropped_groups": float(len(sampled) - len(kept)),
        "time/generate_s": perf_counter() - start - waited,
        "time/reward_s": waited,
    }
    shaped = [_shaped(index, one, settings, step) for index, one in enumerate(kept)]
    return _assemble(step, [one.group for one in kept], shaped, settings), metrics


def _sampled(
    step: int, settings: CollectSettings, prompts: Sequence[Prompt], sampler: Sampler, grade: Grade
) -> Iterator[_Waiting]:
    """Groups as they finish, each being graded."""
    seed = (settings.seed, "rollout", step)
    with suppress(NoResponsesError):  # a refill may be a single bad prompt
        for group in sampler.generate(prompts, settings.group_size, settings.sampling, seed):
            yield group, grade(group.reward_inputs())


def _told(
    groups: Iterable[_Waiting], home: Mapping[str, int], settings: CollectSettings, tell: Tell
) -> Iterator[_Waiting]:
    for group, results in groups:
        sequences = [_sequence(group.prompt, one, 0.0, settings.overlong) for one in group.rollouts]
        tell((home[group.prompt.id], sequences))
        yield group, results


def _graded(groups: Iterable[_Waiting]) -> tuple[dict[str, _Graded], float]:
    """Groups by prompt id, and the seconds that grading took beyond sampling."""
    waiting = {group.prompt.id: (group, results) for group, results in groups}
    generated = perf_counter()
    done = {name: _Graded(group, results()) for name, (group, results) in waiting.items()}
    return done, perf_counter() - generated


def _shaped(index: int, one: _Graded, settings: CollectSettings, step: int) -> list[RewardResult]:
    """Rewards as they are learned from."""
    results = one.results
    if settings.permute_rewards:
        results = list(results)
        random.Random(derive_seed(settings.seed, "permute", step, index)).shuffle(results)
    penalties = [settings.overlong.penalty(n, settings.sampling.max_tokens) for n in _lengths(one.group)]
    return [
        result if result.value is None or not penalty else replace(result, value=result.value + penalty)
        for result, penalty in zip(results, penalties, strict=True)
    ]


def _lengths(group: RolloutGroup) -> list[int]:
    return [len(rollout.response_ids) for rollout in group.rollouts]


def probe(
    step: int, prompts: Sequence[Prompt], sampler: Sampler, sampling: Sampling, seed: tuple[int | str, ...]
) -> RolloutBatch:
    """A few fresh responses, not graded, for learner and engine to score alike. Runs on one rank."""
    groups = list(sampler.generate(prompts, 1, sampling, seed))
    settings = CollectSettings(len(groups), 1, sampling, 0)
    return _assemble(step, groups, [[RewardResult(0.0)] for _ in groups], settings)


def _assemble(
    step: int, groups: list[RolloutGroup], results: list[list[RewardResult]], settings: CollectSettings
) -> RolloutBatch:
    rewards = torch.tensor(
        [[float("nan") if r.value is None else r.value for r in group] for group in results],
        dtype=torch.float64,
    )
    advantages = group_relative(rewards, std=settings.advantage_std).tolist()
    sequences, records = [], []
    for index, (group, graded) in enumerate(zip(groups, results, strict=True)):
        for rollout, result, advantage in zip(group.rollouts, graded, advantages[index], strict=True):
            sequences.append(_sequence(group.prompt, rollout, advantage, settings.overlong))
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


def _sequence(prompt: Prompt, rollout: Rollout, advantage: float, overlong: Overlong) -> TrainSequence:
    ids = torch.cat([torch.tensor(prompt.token_ids), rollout.response_ids])
    written = torch.ones(len(rollout.response_ids), dtype=torch.bool)
    if overlong.rule == "mask" and rollout.truncated:
        written = ~written
    elif rollout.trained is not None:
        written = rollout.trained
    mask = torch.cat([torch.zeros(len(prompt.token_ids), dtype=torch.bool), written])
    logprobs = token_aligned(rollout.rollout_logprobs[written], mask)
    routes = rollout.routes
    if routes is not None:  # the last token has none; whatever it gets, nothing looks back at it
        routes = torch.cat([routes, routes[-1:]])
    return TrainSequence(ids, mask, logprobs, advantage, routes=routes)


def _metrics(
    step: int, settings: CollectSettings, kept: list[_Graded], sampled: list[_Graded]
) -> dict[str, float]:
    """Of the batch, but faults and `reward/sampled_mean` of all that was graded."""
    every = [result for one in sampled for result in one.results]
    faults = [result for result in every if result.value is None]
    if len(faults) > settings.max_fault_rate * len(every):
        raise RewardFaultError(
            f"step {step}: {len(faults)} of {len(every)} rewards could not be computed, over "
            f"reward.max_fault_rate = {settings.max_fault_rate}; first: {faults[0].fault}"
        )
    lengths = torch.tensor([n for one in kept for n in _lengths(one.group)], dtype=torch.float64)
    rollouts = [rollout for one in kept for rollout in one.group.rollouts]
    limit, rule = settings.sampling.max_tokens, settings.overlong
    penalties = torch.tensor([rule.penalty(int(n), limit) for n in lengths], dtype=torch.float64)
    return {
        "reward/mean": _mean([result for one in kept for result in one.results]),
        "reward/sampled_mean": _mean(every),
        "reward/length_penalty": float(penalties.mean()),
        "reward/mixed_groups": sum(one.is_mixed for one in kept) / len(kept),
        "reward/faults": float(len(faults)),
        "reward/timeouts": float(sum(result.timed_out for result in every)),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
    }


def _mean(results: Sequence[RewardResult]) -> float:
    """Of the rewards that are there."""
    values = [result.value for result in results if result.value is not None]
    return sum(values) / len(values) if values else 0.0
