"""Where a step's batch comes from: another run, this one's disk, a thread beside the updates, or anew."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pnpo_megatron.build import Live
from pnpo_megatron.config import Config
from pnpo_megatron.data.order import Mixture, PromptSource
from pnpo_megatron.errors import DataError, RolloutError
from pnpo_megatron.loop import Metrics
from pnpo_megatron.resume import HARMLESS
from pnpo_megatron.rollout.ahead import Ahead
from pnpo_megatron.rollout.collect import CollectSettings, Overlong, Tell, collect
from pnpo_megatron.rollout.store import RolloutStore
from pnpo_megatron.types import RolloutBatch

Sampled = tuple[RolloutBatch, dict[str, str]]
"""A batch and the note that is stored with it."""


class Batches:
    """The rollout batches of a run. Lives on rank 0; nothing here is collective."""

    def __init__(
        self, config: Config, live: Live, store: RolloutStore, ahead: str, say: Callable[[str], None]
    ) -> None:
        """`ahead`: names a batch that was sampled already with older weights."""
        self.config, self._live, self._store, self._say = config, live, store, say
        self.ahead = ahead
        self._note: dict[str, str] = {}
        rollout = config.rollout
        self._replay = RolloutStore(Path(rollout.replay)) if rollout.replay else None
        self.timeout_s = (1 + rollout.max_refills) * rollout.generate_timeout_s + config.run.timeout_s
        self._ahead: Ahead[Sampled] = Ahead(self.timeout_s)

    def take(self, step: int) -> tuple[RolloutBatch, Metrics]:
        """The batch of `step`; the prompt order goes on behind it."""
        if self._replay is not None:
            return self._routed(self._replay.read(step)), {}
        stored = True
        sampled = self._ahead.take(step) or self._held(step)
        if sampled is None:
            sampled, stored = self._sample(step, self._live.prompts), False
        batch, self._note = sampled
        self.ahead = ""
        oldest = min(record.version for record in batch.records)
        max_lag = self.config.rollout.max_lag
        if oldest < step - 1 - max_lag:
            raise RolloutError(
                f"step {step}: a response of version {oldest}, more than rollout.max_lag = {max_lag} behind"
            )
        self._live.prompts.restore(json.loads(self._note["prompts"]))
        if not stored:
            self._store.write(batch, self._note)  # at once: a run killed from here on does not pay again
        metrics: Metrics = json.loads(self._note["metrics"])
        return batch, metrics | {"rollout/version_lag": float(step - 1 - oldest)}

    def _routed(self, batch: RolloutBatch) -> RolloutBatch:
        """With the sampler's routes if they are followed, else without.

        Raises:
            DataError: it has none.
        """
        if self.config.model.router_replay != "rollout":
            return batch.with_routes([None] * len(batch.sequences))
        if any(one.routes is None for one in batch.sequences):
            raise DataError(
                f"step {batch.step}: its responses were sampled without the routes that model.router_replay "
                '= "rollout" follows; replay a run that was made with that setting, or use true'
            )
        return batch

    def write_scored(self, batch: RolloutBatch) -> None:
        """To disk, with old log-probs."""
        self._store.write(batch, self._note)

    def begin(self, step: int, tell: Tell | None = None) -> None:
        """Sample the batch of `step` in a thread: beside the updates on the one before, or telling of it."""
        if self._live.engine.version is not None:  # None: resumed inside a batch
            prompts = self._live.prompts.fork()  # a checkpoint saved meanwhile goes on from here
            self._ahead.begin(step, lambda: self._sample(step, prompts, tell))

    def begin_new(self, step: int, tell: Tell) -> None:
        """Unless it is on the disk already."""
        if any(self._store.held(step, name) for name in (self._identity(), self.ahead) if name):
            tell(None)
        else:
            self.begin(step, tell)

    def take_told(self, step: int) -> tuple[RolloutBatch, Metrics]:
        """What `begin_new` began, or found."""
        self.finish_ahead()
        return self.take(step)

    def finish_ahead(self) -> None:
        """Wait for the batch that is sampled beside the updates, and store it: checkpoints name it."""
        if sampled := self._ahead.wait():
            batch, note = sampled
            self._store.write(batch, note)
            self.ahead = note["run"]

    def close(self) -> None:
        """Forget what is under way."""
        self._ahead.close()

    def _sample(self, step: int, prompts: PromptSource | Mixture, tell: Tell | None = None) -> Sampled:
        rollout, reward = self.config.rollout, self.config.reward
        settings = CollectSettings(
            prompts=rollout.prompts,
            group_size=rollout.group_size,
            sampling=self._live.inputs.sampling,
            seed=self.config.seed,
            advantage_std=self.config.objective.advantage_std,
            permute_rewards=reward.permute,
            max_fault_rate=reward.max_fault_rate,
            dynamic=rollout.dynamic_sampling,
            max_refills=rollout.max_refills,
            overlong=Overlong(rollout.overlong, rollout.overlong_buffer, rollout.overlong_penalty),
        )
        engine, grade = self._live.engine, self._live.graders.start
        try:
            batch, metrics = collect(step, settings, prompts.take, engine, grade, tell)
        finally:
            if tell:
                tell(None)
        note = {
            "run": self._identity(),
            "metrics": json.dumps(metrics),
            "prompts": json.dumps(prompts.position),
        }
        return self._routed(batch), note

    def _held(self, step: int) -> Sampled | None:
        """The batch, if this run sampled it already: with these very weights, or ahead of its checkpoint."""
        names = [self._identity(), self.ahead]
        held = next((one for name in names if name and (one := self._store.held(step, name))), None)
        if held:
            self._say(f"step {step}: its rollouts are on the disk and are not sampled again")
        return held

    def _identity(self) -> str:
        """Names all that a batch depends on: weights, prompts, and how they are sampled and graded."""
        settings = {
            key: value
            for key, value in self.config.flat().items()
            if key.startswith(("seed", "rollout.", "reward.", "objective.advantage", "model.router_replay"))
            and not key.startswith(HARMLESS)
        }
        prompts = self._live.prompts.position["fingerprint"]
        parts = [self._live.engine.weights_digest, prompts, asdict(self._live.inputs.sampling), settings]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
