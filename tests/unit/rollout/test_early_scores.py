"""rollout.overlap_logprobs: scored while others are sampled, and the same numbers whoever comes first."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pnpo_megatron.config import load_config
from pnpo_megatron.data.order import PromptSource
from pnpo_megatron.errors import ConfigError, RolloutError
from pnpo_megatron.rollout.ahead import Ahead
from pnpo_megatron.rollout.collect import CollectSettings, Tell, collect
from pnpo_megatron.run.early import EarlyScores
from pnpo_megatron.types import MiniBatch, Prompt, RewardResult, Rollout, RolloutBatch, RolloutGroup, Sampling

PROMPTS = [Prompt(id=f"p{i}", token_ids=(1, 2, 3 + i), answer="", text=f"p{i}") for i in range(14)]
DEADLINE_S = 10.0


class Engine:
    """Gives groups in the order of `order`, `pause_s` apart; before the last it waits for the learner."""

    def __init__(self, order: int, pause_s: float = 0.0, fails: Sequence[str] = ()) -> None:
        self.order, self.pause_s, self.fails = random.Random(order), pause_s, fails
        self.learner_began: threading.Event | None = None
        self.ended = 0.0

    def generate(self, prompts: Sequence[Prompt], group_size: int, *_: Any) -> Iterator[RolloutGroup]:
        left = [prompt for prompt in prompts if prompt.id not in self.fails]
        self.order.shuffle(left)
        for number, prompt in enumerate(left, 1):
            if number == len(left) > 1 and self.learner_began:
                assert self.learner_began.wait(DEADLINE_S), "nothing is scored before the last group is there"
            time.sleep(self.pause_s)
            n = prompt.token_ids[-1] % 3 + 1
            yield RolloutGroup(
                prompt,
                tuple(
                    Rollout(torch.arange(n + i), torch.zeros(n + i), "stop", i, i, 0, "")
                    for i in range(group_size)
                ),
            )
        self.ended = time.monotonic()


class Learner:
    """Its numbers depend on what is scored together, as those of a packed forward pass may."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s, self.began, self.calls = pause_s, threading.Event(), 0

    def log_probs(self, mini_batch: MiniBatch) -> list[Tensor]:
        self.began.set()
        self.calls += 1
        time.sleep(self.pause_s)
        together = sum(int(sequence.ids.sum()) for sequence in mini_batch.sequences)
        return [
            torch.where(sequence.response_mask, sequence.ids / 7 + together, 0.0)
            for sequence in mini_batch.sequences
        ]


def batch_of(
    engine: Engine, learner: Learner, *, part: int = 2, told: bool = True, dropped: Sequence[str] = ()
) -> RolloutBatch:
    """Eight places; with `told` False the batch is on the disk and nothing is sampled."""
    settings = CollectSettings(
        prompts=8, group_size=2, sampling=Sampling(1.0, 8), seed=5, max_refills=1, dynamic=True
    )
    source, ahead = PromptSource(PROMPTS, seed=0, shuffle=False), Ahead[Any](DEADLINE_S)

    def grade(inputs: Sequence[Any]) -> Any:
        same = inputs[0].prompt in dropped
        return lambda: [RewardResult(float(i) * (not same)) for i in range(len(inputs))]

    def sample(tell: Tell | None) -> Any:
        try:
            return collect(1, settings, source.take, engine, grade, tell)  # type: ignore[arg-type]
        finally:
            if tell:
                tell(None)

    def begin(step: int, tell: Tell) -> None:
        ahead.begin(step, lambda: sample(tell if told else None))
        if not told:
            tell(None)

    config = SimpleNamespace(rollout=SimpleNamespace(prompts=8, group_size=2))
    batches = SimpleNamespace(
        config=config, begin_new=begin, take_told=lambda step: ahead.take(step), timeout_s=DEADLINE_S
    )
    scores = EarlyScores(learner, None, batches, part)  # type: ignore[arg-type]
    try:
        return scores(1, "sampling")[0]
    finally:
        ahead.close()


def old(batch: RolloutBatch) -> list[list[float]]:
    return [one.old_logprobs.tolist() for one in batch.sequences if one.old_logprobs is not None]


@pytest.mark.parametrize("part", [1, 2, 3])
def test_the_numbers_do_not_depend_on_who_comes_first(part: int) -> None:
    late = old(batch_of(Engine(0), learner := Learner(), part=part, told=False))
    parts = -(-8 // part)
    assert len(late) == 16 and learner.calls == parts
    for order in range(6):
        learner = Learner()
        assert old(batch_of(Engine(order), learner, part=part)) == late
        assert learner.calls == parts, "nothing is scored twice"


def test_the_learner_scores_while_the_engine_samples() -> None:
    engine, learner = Engine(1, pause_s=0.2), Learner(pause_s=0.2)
    engine.learner_began = learner.began
    start = time.monotonic()
    batch_of(engine, learner, part=1)
    assert time.monotonic() - start < 2.6, "1.6 s of each, one beside the other"


def test_a_place_that_goes_to_another_prompt_is_scored_again_with_its_part() -> None:
    late = old(batch_of(Engine(0, fails=["p2", "p5"]), Learner(), told=False))
    for order in range(4):
        learner = Learner()
        assert old(batch_of(Engine(order, fails=["p2", "p5"]), learner)) == late
        assert learner.calls == 4


def test_a_part_of_other_groups_is_scored_again() -> None:
    """Dropped for equal rewards after they were scored: others take their places, unless dropped too."""
    for dropped in (["p1", "p6"], ["p1", "p6", "p8", "p9"]):
        late = old(batch_of(Engine(0), Learner(), told=False, dropped=dropped))
        learner = Learner()
        assert old(batch_of(Engine(2), learner, dropped=dropped)) == late
        assert learner.calls == 4 + len(dropped), "two parts of four, once more after every drop"


def test_an_error_of_the_sampler_is_raised_and_nobody_waits() -> None:
    start = time.monotonic()
    with pytest.raises(RolloutError, match="gave no responses"):
        batch_of(Engine(0, fails=[prompt.id for prompt in PROMPTS[:12]]), Learner())
    assert time.monotonic() - start < DEADLINE_S / 2


@pytest.mark.parametrize(
    "flag",
    [
        "--objective.old_logprobs=rollout",
        "--rollout.colocated=true",
        "--rollout.replay=run",
        "--model.router_replay=true",
    ],
)
def test_what_cannot_be_scored_early_is_refused(tmp_path: Path, flag: str) -> None:
    (tmp_path / "config.toml").write_text('[model]\nhf = "none"\n[data]\nprompts = "none.jsonl"\n')
    with pytest.raises(ConfigError, match="overlap_logprobs = true and"):
        load_config(tmp_path / "config.toml", ["--rollout.overlap_logprobs=true", flag])
