"""What the loop's parts do on this rank, and what is due after an update and after a step."""

import signal
from collections.abc import Mapping
from types import FrameType

from torch import Tensor

from pnpo_megatron import build
from pnpo_megatron.algorithm.correction import Correction
from pnpo_megatron.analysis.token_dump import token_arrays, write_tokens
from pnpo_megatron.checkpoints import Checkpoints, Start, due
from pnpo_megatron.config import Config
from pnpo_megatron.loop import Metrics, Parts, Plan, Position, train
from pnpo_megatron.monitor import Monitor
from pnpo_megatron.parallel.groups import group_size
from pnpo_megatron.parallel.rank_zero import any_rank, from_rank_zero
from pnpo_megatron.parallel.watch import Watch
from pnpo_megatron.policy.learner import SKIP_REASONS
from pnpo_megatron.profiling import StepProfile
from pnpo_megatron.resume import RunState
from pnpo_megatron.rollout.mismatch import (
    check_mismatch,
    correction_metrics,
    mismatch_metrics,
    reference_metrics,
)
from pnpo_megatron.rollout.store import RolloutStore
from pnpo_megatron.run.batches import Batches
from pnpo_megatron.run.early import EarlyScores
from pnpo_megatron.run.notices import opening_lines
from pnpo_megatron.run.outcome import evaluate_step, export_step
from pnpo_megatron.run.sharing import share_batch
from pnpo_megatron.run.sync import WeightSync
from pnpo_megatron.tracking import open_trackers
from pnpo_megatron.types import MiniBatch, RolloutBatch

SEQUENCES_A_RANK = 4
"""That a data-parallel rank scores at a time while others are sampled."""


class Run:
    """The loop's parts on this rank. Every method is collective unless it says otherwise."""

    def __init__(
        self,
        config: Config,
        live: build.Live,
        watch: Watch | None = None,
        start: Start | None = None,
        dump_tokens: int | None = None,
        profile: int | None = None,
    ) -> None:
        """Restore the newest checkpoint of the run folder, or the chosen one, if there is one."""
        self.config, self.live, self.watch = config, live, watch or Watch(0.0, None)
        self.watch.place = "restoring a checkpoint"
        self.control = live.groups.control
        self.is_writer = live.groups.world_rank == 0
        self.store = RolloutStore(config.run.folder, keep=config.rollout.keep)
        self.checkpoints = Checkpoints(config, live, self.store)
        self.position, state = self.checkpoints.restore(start or Start())
        self.plan = _plan(config)
        self.updates_of_a_batch = (
            config.objective.epochs * config.rollout.prompts // config.objective.mini_batch
        )
        self.monitor = Monitor(
            config.run.folder,
            total_updates=config.steps * self.updates_of_a_batch,
            active=self.is_writer,
            resume_at_bytes=state.metrics_bytes if state else None,
            update=self.position.update,
            trackers=open_trackers(config.track, config.run.folder, config.flat()) if self.is_writer else (),
        )
        say = self.monitor.say
        self.batches = Batches(config, live, self.store, state.ahead if state else "", say)
        self.early = self._early_scores() if self.plan.scored_early else None
        self.weight_sync = WeightSync(config, live, self.batches.finish_ahead, say)
        if self.position.batch and live.learner.first_epoch:
            live.learner.first_epoch.unknown_step = self.position.batch.step
        self._dump_step = dump_tokens
        self._profile_step = profile
        self._dumped: dict[str, Tensor] = {}
        self._stop = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_signal)
        self._announce(state)

    def train(self) -> bool:
        """Run the loop; True when all steps are done."""
        parts = Parts(
            learner=self.live.learner,
            objective=self.live.inputs.objective,
            collect=self.collect,
            begin=self.begin,
            compare=self.compare,
            sync=self.sync,
            log=self.log,
            finish_update=self.finish_update,
            finish_step=self.finish_step,
        )
        if self._profile_step is not None:
            rank = self.live.groups.world_rank
            parts = StepProfile(self._profile_step, self.config.run.folder, rank).around(parts)
        last = train(self.plan, parts, self.position)
        return last == self.config.steps

    def collect(self, step: int) -> tuple[RolloutBatch, Metrics]:
        """Sample and grade on rank 0, or replay; every rank gets the batch."""
        self.live.learner.token_dump = self._hold_tokens if step == self._dump_step else None
        doing = self.watch.place = f"sampling and grading step {step}"
        if self.early:
            return self.early(step, doing)
        return share_batch(lambda: self.batches.take(step), self.control, doing)

    def _early_scores(self) -> EarlyScores:
        rollout, ranks = self.config.rollout, group_size(self.live.groups.dp)
        part = min(rollout.prompts, -(-SEQUENCES_A_RANK * ranks // rollout.group_size))
        return EarlyScores(self.live.learner, self.control, self.batches, part)

    def begin(self, step: int) -> None:
        """Sample the batch of `step` beside the updates on the one before. Not collective."""
        if self.is_writer:
            self.batches.begin(step)

    def compare(self, batch: RolloutBatch) -> Metrics:
        """Learner against engine on the whole batch, and the batch to disk. Not collective."""
        self.watch.place = f"update {self.position.update + 1} of step {batch.step}"
        metrics = mismatch_metrics(batch) | reference_metrics(batch)
        check_mismatch(metrics, self.config.rollout.max_mismatch, f"step {batch.step}")
        if self.live.turns and self.live.memory:
            metrics |= self.live.turns.to_learner(self.live.memory)
        if self.plan.correction:
            metrics |= correction_metrics(batch, self.plan.correction)
        if self.is_writer:
            self.batches.write_scored(batch)
        return metrics

    def sync(self, step: int) -> Metrics:
        """Send the learner's weights to the engine, then let both score a few fresh tokens."""
        if self.config.rollout.replay:
            return {}
        self.watch.place = f"sending weights of step {step}"
        return self.weight_sync(step)

    def log(self, step: int, epoch: int, update: int, metrics: Mapping[str, float]) -> None:
        """One row. Not collective."""
        reason = SKIP_REASONS[int(metrics["update/skip_reason"])]
        row = {**metrics, "update/skip_reason": reason}
        self.monitor.log_update(step=step, epoch=epoch, update=update, metrics=row)
        if reason:
            self.monitor.say(f"update {update} of step {step} was skipped: {reason}")
        if self._dumped and self.is_writer:
            write_tokens(self.config.run.folder, step=step, epoch=epoch, update=update, arrays=self._dumped)
        self._dumped = {}

    def finish_update(self, at: Position) -> bool:
        """Save what is due inside a batch; True to stop, with a checkpoint written."""
        self.position = at
        self.watch.place = f"after update {at.update} of step {at.step + 1}"
        self.checkpoints.poll()
        inside = at.made < self.updates_of_a_batch
        # Routes of old log-probs live in memory alone: such a batch is worked to its end before a stop.
        can_stop = self.config.model.router_replay is not True or not inside
        stop = any_rank(self._stop, self.control) and can_stop
        within = due(at.made, self.config.checkpoint.within_batch)
        if stop or (within and inside):
            self.checkpoints.save(at, flush_metrics=self.monitor.flush, wait=stop)
        if stop:
            self._say_stopped(f"update {at.update} of step {at.step + 1}")
        return stop

    def finish_step(self, at: Position) -> bool:
        """Evaluate, export and save what is due; True to stop, with a checkpoint written."""
        config, step = self.config, at.step
        last = step == config.steps
        self.position = at
        self.watch.place = f"evaluating, exporting and saving step {step}"
        score = None
        if step:
            self.monitor.log_step(step)
        if (
            config.eval.benchmarks
            and not config.rollout.replay
            and (step == 0 or last or due(step, config.eval.every))
        ):
            metrics = from_rank_zero(
                lambda: evaluate_step(config, self.live, step), self.control, f"evaluating after step {step}"
            )
            self.monitor.log_eval(step=step, update=at.update, metrics=metrics)
            score = metrics["eval/macro"]
        if step and (last or due(step, config.export.every)):
            export_step(config, self.live, step)
        stop = any_rank(self._stop, self.control)
        if step and (last or stop or due(step, config.checkpoint.every)):
            self.checkpoints.save(
                at, flush_metrics=self.monitor.flush, score=score, wait=last or stop, ahead=self.batches.ahead
            )
        if stop:
            self._say_stopped(f"step {step}")
        return stop

    def close(self) -> None:
        """Finish what is being written. Not collective."""
        self.batches.close()
        self.checkpoints.close()
        self.store.close()
        self.monitor.close()

    def _hold_tokens(self, mini_batch: MiniBatch, dumped: Mapping[str, list[Tensor]]) -> None:
        """Kept until the loop says which update this was."""
        self._dumped = token_arrays(mini_batch, dumped)

    def _announce(self, state: RunState | None) -> None:
        if not self.is_writer:
            return
        self.config.run.folder.mkdir(parents=True, exist_ok=True)
        (self.config.run.folder / "config.toml").write_text(self.config.to_toml(), encoding="utf-8")
        for line in opening_lines(self.config, self.live.inputs):
            self.monitor.say(line)
        if state:
            self.monitor.say(f"resuming after {state.place}")

    def _say_stopped(self, place: str) -> None:
        self.monitor.say(f"stopped by a signal after {place}; start the same command again to go on")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True


def _plan(config: Config) -> Plan:
    rollout, objective = config.rollout, config.objective
    correction = None
    if rollout.correction != "none":
        correction = Correction(rollout.correction, rollout.correction_cap, rollout.correction_mask)
    return Plan(
        seed=config.seed,
        steps=config.steps,
        epochs=objective.epochs,
        groups_per_update=objective.mini_batch,
        learner_scores_old=objective.old_logprobs == "learner",
        correction=correction,
        scored_early=rollout.overlap_logprobs,
        reference=objective.kl_coef > 0,
        max_lag=rollout.max_lag,
        max_skipped=config.optimizer.max_skipped,
        stop_rejected=objective.stop_rejected,
    )
