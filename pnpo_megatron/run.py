"""One training run: what the loop's parts do on this rank, and what is due after a step."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import FrameType

from torch import Tensor

from pnpo_megatron import build
from pnpo_megatron.algorithm.presets import objective_settings
from pnpo_megatron.analysis.gate_model import gate_width_in_sigmas
from pnpo_megatron.analysis.token_dump import token_arrays, write_tokens
from pnpo_megatron.build import OBJECTIVE_KEYS
from pnpo_megatron.config import Config
from pnpo_megatron.convert.hf_writer import write_hf_folder
from pnpo_megatron.data.batching import mini_batches
from pnpo_megatron.eval.evaluate import evaluate
from pnpo_megatron.loop import Metrics, Parts, Plan, scored_by, train
from pnpo_megatron.monitor import Monitor
from pnpo_megatron.parallel.rank_zero import any_rank, from_rank_zero
from pnpo_megatron.policy.checkpoint import load_checkpoint, save_checkpoint
from pnpo_megatron.policy.learner import SKIP_REASONS
from pnpo_megatron.resume import RunState, checkpoint_folder, newest_checkpoint, publish
from pnpo_megatron.rollout.collect import CollectSettings, collect, probe
from pnpo_megatron.rollout.mismatch import check_mismatch, mismatch_metrics
from pnpo_megatron.rollout.store import RolloutStore
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.types import MiniBatch, RolloutBatch

PROBE_TOKENS = 16


def run_training(config: Config, *, dump_tokens: int | None = None) -> bool:
    """Train until `config.steps` or a stop signal. Collective: every rank calls it.

    Args:
        dump_tokens: step of which every token of every update is written to RUN/tokens.
    Returns:
        True when the run is complete, False when it stopped early with a checkpoint.

    Raises:
        UserError: before anything is built, if the input is wrong.
    """
    newest = newest_checkpoint(config.run.folder)
    if newest is not None and RunState.read(newest).step >= config.steps:
        print(f"{config.run.folder}: complete, {config.steps} steps; raise steps to go on")
        return True
    inputs = build.read_inputs(config)
    with build.live_parts(config, inputs) as live:
        run = Run(config, live, dump_tokens)
        try:
            return run.train()
        finally:
            run.close()


class Run:
    """The loop's parts on this rank. Every method is collective unless it says otherwise."""

    def __init__(self, config: Config, live: build.Live, dump_tokens: int | None = None) -> None:
        """Restore the newest checkpoint of the run folder, if there is one."""
        self.config, self.live = config, live
        self.control = live.groups.control
        self.is_writer = live.groups.world_rank == 0
        self.state, resumed = self._restore()
        self.plan = Plan(
            seed=config.seed,
            steps=config.steps,
            epochs=config.objective.epochs,
            groups_per_update=config.objective.mini_batch,
            learner_scores_old=config.objective.old_logprobs == "learner",
            max_skipped=config.optimizer.max_skipped,
        )
        updates = (
            config.steps * config.objective.epochs * (config.rollout.prompts // config.objective.mini_batch)
        )
        self.monitor = Monitor(
            config.run.folder,
            total_updates=updates,
            active=self.is_writer,
            resume_at_bytes=self.state.metrics_bytes if resumed else None,
        )
        self.store = RolloutStore(config.run.folder, keep=config.rollout.keep)
        self.replay = RolloutStore(Path(config.rollout.replay)) if config.rollout.replay else None
        self._dump_step = dump_tokens
        self._dumped: dict[str, Tensor] = {}
        self._stop = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_signal)
        self._announce(resumed)

    def train(self) -> bool:
        """Run the loop; True when all steps are done."""
        parts = Parts(
            learner=self.live.learner,
            objective=self.live.inputs.objective,
            collect=self.collect,
            compare=self.compare,
            sync=self.sync,
            log=self.log,
            finish_step=self.finish_step,
        )
        last = train(self.plan, parts, done=self.state.step, update=self.state.update)
        return last == self.config.steps

    def collect(self, step: int) -> tuple[RolloutBatch, Metrics]:
        """Sample and grade on rank 0, or replay; every rank gets the batch."""
        self.live.learner.token_dump = self._hold_tokens if step == self._dump_step else None
        doing = f"sampling and grading step {step}"
        return from_rank_zero(lambda: self._collect(step), self.control, doing)

    def compare(self, batch: RolloutBatch) -> Metrics:
        """Learner against engine on the whole batch, and the batch to disk. Not collective."""
        metrics = mismatch_metrics(batch)
        check_mismatch(metrics, self.config.rollout.max_mismatch, f"step {batch.step}")
        if self.is_writer:
            self.store.write(batch)
        return metrics

    def sync(self, step: int) -> Metrics:
        """Send the learner's weights to the engine, then let both score a few fresh tokens."""
        if self.replay is not None:
            return {}
        if self.is_writer:
            self._sampler.wait_ready()  # the engine's start is not part of a sync
        start = perf_counter()
        tensors = self.live.learner.export_hf()

        def send() -> None:
            try:
                self._sampler.load_weights(tensors, version=step)
            finally:
                deque(
                    tensors, maxlen=0
                )  # the other ranks are in the export's collectives: never leave them there

        if not self.is_writer:
            deque(tensors, maxlen=0)
        from_rank_zero(send, self.control, f"sending weights of step {step}")
        seconds = perf_counter() - start
        probed = from_rank_zero(lambda: self._probe(step), self.control, "sampling to check the sync")
        together = mini_batches(probed, len(set(probed.groups)), mean="response", seed=(0,))
        gap = mismatch_metrics(scored_by(self.live.learner, probed, together))
        check_mismatch(gap, self.config.rollout.max_mismatch, f"after the sync of step {step}")
        return {"time/sync_s": seconds, "mismatch/sync_mean_abs": gap["mismatch/mean_abs"]}

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

    def finish_step(self, step: int, update: int) -> bool:
        """Evaluate, export and save what is due; True to stop, with a checkpoint written."""
        config, last = self.config, step == self.config.steps
        if step:
            self.monitor.log_step(step)
        if (
            config.eval.benchmarks
            and self.replay is None
            and (step == 0 or last or due(step, config.eval.every))
        ):
            metrics = from_rank_zero(
                lambda: self._evaluate(step), self.control, f"evaluating after step {step}"
            )
            self.monitor.log_eval(step=step, update=update, metrics=metrics)
        if step and (last or due(step, config.export.every)):
            self._export(step)
        stop = any_rank(self._stop, self.control)
        if step and (last or stop or due(step, config.checkpoint.every)):
            self._save(step, update)
        if stop:
            self.monitor.say(f"stopped by a signal after step {step}; start the same command again to go on")
        return stop

    def close(self) -> None:
        """Finish what is being written. Not collective."""
        self.store.close()
        self.monitor.close()

    def _collect(self, step: int) -> tuple[RolloutBatch, Metrics]:
        if self.replay is not None:
            return self.replay.read(step), {}
        assert self.live.rewards is not None
        settings = CollectSettings(
            prompts=self.config.rollout.prompts,
            group_size=self.config.rollout.group_size,
            sampling=self.live.inputs.sampling,
            seed=self.config.seed,
            advantage_std=self.config.objective.advantage_std,
            permute_rewards=self.config.reward.permute,
            max_fault_rate=self.config.reward.max_fault_rate,
        )
        return collect(step, settings, self.live.prompts.take, self._sampler, self.live.rewards.start)

    def _hold_tokens(self, mini_batch: MiniBatch, dumped: Mapping[str, list[Tensor]]) -> None:
        """Kept until the loop says which update this was."""
        self._dumped = token_arrays(mini_batch, dumped)

    def _probe(self, step: int) -> RolloutBatch:
        prompts = self.live.inputs.prompts[: self.config.rollout.sync_check]
        sampling = replace(
            self.live.inputs.sampling, max_tokens=min(PROBE_TOKENS, self.live.inputs.sampling.max_tokens)
        )
        return probe(step, prompts, self._sampler, sampling, (self.config.seed, "probe", step))

    def _evaluate(self, step: int) -> Metrics:
        assert self.live.rewards is not None
        result = evaluate(
            self._sampler,
            self.live.inputs.benchmarks,
            samples=self.config.eval.samples,
            sampling=self.live.inputs.eval_sampling,
            grade=self.live.rewards.start,
            seed=self.config.seed,
        )
        result.write(self.config.run.folder / "eval", step)
        return result.to_metrics()

    def _export(self, step: int) -> None:
        """Full tensors to a Hugging Face folder, written by rank 0."""
        tensors = self.live.learner.export_hf()

        def write() -> None:
            target = self.config.run.folder / "hf" / f"step_{step:06d}"
            try:
                write_hf_folder(target, self.live.inputs.folder, tensors, overwrite=True)
            finally:
                deque(tensors, maxlen=0)

        if not self.is_writer:
            deque(tensors, maxlen=0)
        from_rank_zero(write, self.control, f"exporting step {step}")

    def _save(self, step: int, update: int) -> None:
        self.store.flush()
        state = RunState(step, update, self.live.prompts.position, self.monitor.bytes_written)
        folder = checkpoint_folder(self.config.run.folder, step)
        learner = self.live.learner
        save_checkpoint(
            folder,
            learner.chunks,
            learner.optimizer,
            self.live.groups,
            source=self.live.inputs.folder,
            finish=state.write,
        )
        if self.is_writer:
            publish(self.config.run.folder, folder, self.config.checkpoint.keep)

    def _restore(self) -> tuple[RunState, bool]:
        newest = newest_checkpoint(self.config.run.folder)
        if newest is None:
            return RunState(), False
        load_checkpoint(newest, self.live.learner.chunks, self.live.learner.optimizer, self.live.groups)
        state = RunState.read(newest)
        self.live.prompts.restore(state.prompts)
        return state, True

    def _announce(self, resumed: bool) -> None:
        if not self.is_writer:
            return
        self.config.run.folder.mkdir(parents=True, exist_ok=True)
        (self.config.run.folder / "config.toml").write_text(self.config.to_toml(), encoding="utf-8")
        self.monitor.say(f"prompts: {self.live.inputs.prompt_summary}")
        self.monitor.say(self._gate_width())
        if resumed:
            self.monitor.say(f"resuming after step {self.state.step}, update {self.state.update}")

    def _gate_width(self) -> str:
        """What the tolerances mean at this length."""
        objective = self.config.objective
        values = objective_settings(**objective.model_dump(include=OBJECTIVE_KEYS))
        if "gate_low" not in values:
            return f"objective: {values}"
        return gate_width_in_sigmas(
            gate_low=values["gate_low"],
            gate_high=values["gate_high"],
            length=self.config.rollout.max_response_tokens,
            reference_length=values.get("gate_reference_length"),
        )

    @property
    def _sampler(self) -> VllmSampler:
        assert self.live.sampler is not None, "only rank 0 samples"
        return self.live.sampler

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True


def due(step: int, every: int) -> bool:
    """Every `every` steps; 0 is never."""
    return every > 0 and step > 0 and step % every == 0
