"""Saves a run and goes on with it: which checkpoint, what is in it, what happens if it cannot be written."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pnpo_megatron import build
from pnpo_megatron.config import Config
from pnpo_megatron.errors import CheckpointError, ConfigError
from pnpo_megatron.loop import START, Position
from pnpo_megatron.manifest import damage
from pnpo_megatron.parallel.rank_zero import any_rank, from_rank_zero, gather_from_all
from pnpo_megatron.policy.checkpoint import CheckpointSave, load_checkpoint
from pnpo_megatron.policy.random_state import restore_random_state
from pnpo_megatron.resume import (
    RunState,
    candidates,
    changed_settings,
    checkpoint_folder,
    layout_refusal,
    newest_sound,
    publish,
    remove_unfinished,
    set_aside,
    state_of,
    whole_checkpoints,
)
from pnpo_megatron.rollout.store import RolloutStore


@dataclass(frozen=True)
class Start:
    """How a person wants to go on."""

    chosen: str = ""
    """Name of a checkpoint; empty takes the newest that is sound."""
    allow_change: bool = False
    """Go on with settings that change the run."""

    def found(self, run_folder: Path) -> list[Path]:
        """Checkpoints to try, in this order.

        Raises:
            ConfigError: there is none of the chosen name.
        """
        if not self.chosen:
            return candidates(run_folder)
        there = [folder for folder in whole_checkpoints(run_folder) if folder.name == self.chosen]
        if not there:
            names = ", ".join(folder.name for folder in whole_checkpoints(run_folder)) or "none"
            raise ConfigError(f"--from {self.chosen}: no such checkpoint in {run_folder}; there are: {names}")
        return there

    def check(self, config: Config) -> None:
        """Refuse, before anything is built, what cannot go on from the newest checkpoint."""
        for folder in self.found(config.run.folder)[:1]:
            if state := state_of(folder):
                self.check_settings(state, config)

    def check_settings(self, state: RunState, config: Config) -> list[str]:
        """Compare the settings with a checkpoint's; the differences, for a person to read.

        Raises:
            ConfigError: one changes the run and `allow_change` is not set, or the layout cannot be loaded.
        """
        changes, rounding = changed_settings(state.config, config.flat())
        if changes and not self.allow_change:
            raise ConfigError(
                f"{config.run.folder} was begun with other settings: {'; '.join(changes)}. Set them back, "
                "add --allow-change to go on with the new ones, or give another run.folder"
            )
        if refusal := layout_refusal(state, config.flat(), whole_checkpoints(config.run.folder)):
            raise ConfigError(refusal)
        return [f"changed, and changes the run: {one}" for one in changes] + [
            f"changed, within rounding: {one}" for one in rounding
        ]


def due(step: int, every: int) -> bool:
    """Every `every` steps; 0 is never."""
    return every > 0 and step > 0 and step % every == 0


class Checkpoints:
    """The checkpoints of one run on this rank. Every method is collective unless it says otherwise."""

    def __init__(self, config: Config, live: build.Live, store: RolloutStore) -> None:
        """`store`: where the batches lie that go into checkpoints."""
        self._config, self._live, self._store = config, live, store
        self._control, self._is_writer = live.groups.control, live.groups.world_rank == 0
        self._pending: tuple[CheckpointSave, RunState] | None = None

    def restore(self, start: Start) -> tuple[Position, RunState | None]:
        """Load the newest checkpoint that is sound, or the chosen one; START and None for a fresh run."""
        run_folder = self._config.run.folder
        if self._is_writer:
            remove_unfinished(run_folder)
        found = from_rank_zero(lambda: start.found(run_folder), self._control, "looking for checkpoints")
        checkpoint = newest_sound(found, self._damage, self._pass_over)
        if checkpoint is None:
            return START, None
        state = RunState.read(checkpoint)
        for difference in start.check_settings(state, self._config):
            self._say(difference)
        groups, learner = self._live.groups, self._live.learner
        load_checkpoint(checkpoint, learner.chunks, learner.optimizer, groups)
        if not restore_random_state(checkpoint, groups.world_rank, groups.world_size):
            self._say("another number of ranks: random states are seeded anew")
        self._restore_prompts(state, start.allow_change)
        self._store.needed_from = state.step + 1
        batch = RolloutStore(checkpoint).read(state.step + 1, frozen=True) if state.inside else None
        return Position(**state.counts(), batch=batch), state

    def save(
        self,
        at: Position,
        *,
        flush_metrics: Callable[[], int],
        score: float | None = None,
        wait: bool = False,
        ahead: str = "",
    ) -> None:
        """Start saving, after the save before it is done; `wait` until it is published.

        Raises:
            CheckpointError: it cannot be written, and `checkpoint.on_failure` is "stop" or the run ends here.
        """
        self.finish()
        self._store.flush()
        state = RunState(
            **at.counts(),
            inside=at.batch is not None,
            ahead=ahead,
            prompts=self._live.prompts.position,
            metrics_bytes=flush_metrics(),
            score=score,
            portable=self._is_portable(at),
            config=self._config.flat(),
        )
        background = self._config.checkpoint.asynchronous and not wait
        try:
            self._begin(at, state, background)
        except CheckpointError as error:
            self._failed(error, wait)
        if not background:
            self.finish(must=wait)

    def close(self) -> None:
        """Wait until this rank writes nothing any more. Not collective, and publishes nothing."""
        if self._pending:
            self._pending[0].wait(self._config.run.timeout_s)

    def poll(self) -> None:
        """Publish a save whose ranks have all written. Cheap: nothing is waited for."""
        if self._pending and not any_rank(not self._pending[0].is_written, self._control):
            self.finish()

    def finish(self, *, must: bool = False) -> None:
        """Wait for the save that is on its way, and publish it; `must`: a failure ends the run."""
        if self._pending is None:
            return
        (save, state), self._pending = self._pending, None
        try:
            save.finish(self._config.run.timeout_s)
        except CheckpointError as error:
            self._failed(error, must)
            return
        keep = self._config.checkpoint.keep
        from_rank_zero(
            lambda: publish(self._config.run.folder, save.folder, keep),
            self._control,
            f"publishing {save.folder}",
        )
        self._store.needed_from = state.step + 1

    def _begin(self, at: Position, state: RunState, background: bool) -> None:
        epoch = -(-at.made * self._config.objective.mini_batch // self._config.rollout.prompts)
        name = (epoch, at.update) if state.inside else None

        def write_more(folder: Path) -> None:
            state.write(folder)
            if state.inside:
                self._store.copy(state.step + 1, folder)

        learner = self._live.learner
        save = CheckpointSave(
            checkpoint_folder(self._config.run.folder, state.step + state.inside, name),
            learner.chunks,
            learner.optimizer,
            self._live.groups,
            portable=state.portable,
            source=self._live.inputs.folder,
            write_more=write_more,
            background=background,
        )
        self._pending = save, state

    def _is_portable(self, at: Position) -> bool:
        """Gathering the optimizer state costs time, and host memory on every rank: not at every save."""
        every = self._config.checkpoint.portable_every
        now = at.step == self._config.steps or due(at.step, every)
        return not self._config.optimizer.distributed or (at.batch is None and now)

    def _failed(self, error: CheckpointError, must: bool) -> None:
        if must or self._config.checkpoint.on_failure == "stop":
            raise error
        self._say(f'{error}; going on without it (checkpoint.on_failure = "go_on")')

    def _damage(self, checkpoint: Path) -> list[str]:
        """Checked by all ranks, a share of the files each."""
        groups = self._live.groups
        wrong = damage(checkpoint, groups.world_rank, groups.world_size)
        return sorted({one for part in gather_from_all(wrong, self._control) for one in part})

    def _pass_over(self, checkpoint: Path, why: str) -> None:
        self._say(f"checkpoint {checkpoint.name} is damaged and passed over: {why}")
        if self._is_writer:
            set_aside(checkpoint)

    def _restore_prompts(self, state: RunState, allow_change: bool) -> None:
        prompts = self._live.prompts
        if allow_change and state.prompts["fingerprint"] != prompts.position["fingerprint"]:
            self._say("changed, and changes the run: the prompts; their order begins anew")
            return
        prompts.restore(state.prompts)

    def _say(self, message: str) -> None:
        if self._is_writer:
            print(message, file=sys.stderr, flush=True)
