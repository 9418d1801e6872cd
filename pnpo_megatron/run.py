"""One training run: what the loop's parts do on this rank, and what is due after a step."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from types import FrameType

import torch
from torch import Tensor

from pnpo_megatron import build
from pnpo_megatron.algorithm.correction import Correction
from pnpo_megatron.algorithm.presets import objective_settings
from pnpo_megatron.analysis.gate_model import gate_width_in_sigmas
from pnpo_megatron.analysis.token_dump import token_arrays, write_tokens
from pnpo_megatron.build import LOSS_KEYS
from pnpo_megatron.checkpoints import Checkpoints, Start
from pnpo_megatron.config import Config
from pnpo_megatron.convert.hf_writer import write_hf_folder
from pnpo_megatron.data.batching import mini_batches
from pnpo_megatron.data.mixture import Mixture
from pnpo_megatron.data.prompts import PromptSource
from pnpo_megatron.errors import RolloutError
from pnpo_megatron.eval.evaluate import evaluate
from pnpo_megatron.eval.overlap import in_prompts, warning
from pnpo_megatron.eval.progress import Progress, problems_digest
from pnpo_megatron.loop import Metrics, Parts, Plan, Position, scored_by, train
from pnpo_megatron.monitor import Monitor
from pnpo_megatron.parallel.rank_zero import any_rank, from_rank_zero
from pnpo_megatron.parallel.watch import Watch
from pnpo_megatron.policy.learner import SKIP_REASONS
from pnpo_megatron.profiling import StepProfile
from pnpo_megatron.resume import HARMLESS, RunState, is_complete
from pnpo_megatron.rollout.ahead import Ahead
from pnpo_megatron.rollout.collect import CollectSettings, Overlong, collect, probe
from pnpo_megatron.rollout.mismatch import check_mismatch, correction_metrics, mismatch_metrics
from pnpo_megatron.rollout.probe import advice_for, self_check
from pnpo_megatron.rollout.sampler import EngineSampler
from pnpo_megatron.rollout.store import RolloutStore
from pnpo_megatron.types import MiniBatch, RolloutBatch

PROBE_TOKENS = 16


def run_training(
    config: Config,
    *,
    dump_tokens: int | None = None,
    chosen: str = "",
    allow_change: bool = False,
    profile: int | None = None,
) -> bool:
    """Train until `config.steps` or a stop signal. Collective: every rank calls it.

    Args:
        dump_tokens: step of which every token of every update is written to RUN/tokens.
        profile: step of which a trace and a table go to RUN/profile.
        chosen: name of the checkpoint to go on from; empty takes the newest that is sound.
        allow_change: go on with settings that change the run.
    Returns:
        True when the run is complete, False when it stopped early with a checkpoint.

    Raises:
        UserError: before anything is built, if the input is wrong.
    """
    if not chosen and is_complete(config.run.folder, config.steps):
        print(f"{config.run.folder}: complete, {config.steps} steps; raise steps to go on")
        return True
    start = Start(chosen, allow_change)
    start.check(config)
    inputs = build.read_inputs(config)
    with (
        build.live_parts(config, inputs) as live,
        Watch(
            config.run.silence_s, live.groups.control, lambda: write_exit_code(config.run.folder, 1)
        ) as watch,
    ):
        gc.freeze()  # what is imported and built stays: Megatron collects garbage at every save
        run = Run(config, live, watch, start, dump_tokens, profile)
        try:
            return run.train()
        finally:
            run.close()


def write_exit_code(run_folder: Path, code: int) -> None:
    """For the batch script: torchrun turns every exit code into 1. Rank 0 writes."""
    if int(os.environ.get("RANK", "0")) == 0 and run_folder.is_dir():
        (run_folder / "exit_code").write_text(f"{code}\n")


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
        self.plan = Plan(
            seed=config.seed,
            steps=config.steps,
            epochs=config.objective.epochs,
            groups_per_update=config.objective.mini_batch,
            learner_scores_old=config.objective.old_logprobs == "learner",
            correction=_correction(config),
            max_lag=config.rollout.max_lag,
            max_skipped=config.optimizer.max_skipped,
            stop_rejected=config.objective.stop_rejected,
        )
        updates = (
            config.steps * config.objective.epochs * (config.rollout.prompts // config.objective.mini_batch)
        )
        self.monitor = Monitor(
            config.run.folder,
            total_updates=updates,
            active=self.is_writer,
            resume_at_bytes=state.metrics_bytes if state else None,
            update=self.position.update,
        )
        self.replay = RolloutStore(Path(config.rollout.replay)) if config.rollout.replay else None
        self._dump_step = dump_tokens
        self._profile_step = profile
        self._dumped: dict[str, Tensor] = {}
        self._stop = False
        self._checked = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_signal)
        self._note: dict[str, str] = {}
        limit = (1 + config.rollout.max_refills) * config.rollout.generate_timeout_s + config.run.timeout_s
        self._ahead: Ahead[tuple[RolloutBatch, dict[str, str]]] = Ahead(limit)
        self._ahead_name = state.ahead if state else ""
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
        return from_rank_zero(lambda: self._collect(step), self.control, doing)

    def begin(self, step: int) -> None:
        """Sample the batch of `step` beside the updates on the one before. Not collective."""
        if self.is_writer and self._sampler.version is not None:  # None: resumed inside a batch
            prompts = self.live.prompts.fork()  # a checkpoint saved meanwhile goes on from here
            self._ahead.begin(step, lambda: self._sample(step, prompts))

    def compare(self, batch: RolloutBatch) -> Metrics:
        """Learner against engine on the whole batch, and the batch to disk. Not collective."""
        self.watch.place = f"update {self.position.update + 1} of step {batch.step}"
        metrics = mismatch_metrics(batch)
        check_mismatch(metrics, self.config.rollout.max_mismatch, f"step {batch.step}")
        if self.live.turns and self.live.memory:
            metrics |= self.live.turns.to_learner(self.live.memory)
        if self.plan.correction:
            metrics |= correction_metrics(batch, self.plan.correction)
        if self.is_writer:
            self.store.write(batch, self._note)
        return metrics

    def sync(self, step: int) -> Metrics:
        """Send the learner's weights to the engine, then let both score a few fresh tokens."""
        if self.replay is not None:
            return {}
        self.watch.place = f"sending weights of step {step}"
        if self.is_writer:
            self._sampler.wait_ready()  # the engine's start is not part of a sync
        waiting = perf_counter()
        from_rank_zero(self._finish_ahead, self.control, "waiting for the next batch's responses")
        start = perf_counter()
        tensors = self.live.learner.export_hf()
        switched: Metrics = {}

        def load() -> None:
            self._sampler.load_weights(tensors, version=step)

        def send() -> None:
            try:
                if self.live.turns and self.live.memory:
                    switched.update(self.live.turns.to_engine(self.live.memory, load))
                else:
                    load()
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
        probed = scored_by(self.live.learner, probed, together)
        gap = mismatch_metrics(probed)
        check_mismatch(gap, self.config.rollout.max_mismatch, f"after the sync of step {step}")
        if not self._checked:
            self.monitor.say(self._self_check(probed, gap["mismatch/mean_abs"]))
            self._checked = True
        named = {key.replace("mismatch/", "mismatch/sync_"): value for key, value in gap.items()}
        # Where the engine's own log-probs are the old ones, the batch itself shows no difference.
        waited = {"time/generate_wait_s": start - waiting} if self.plan.max_lag else {}
        named |= switched
        return {"time/sync_s": seconds, **waited, **named, **({} if self.plan.learner_scores_old else gap)}

    def _self_check(self, probed: RolloutBatch, mean_abs: float) -> str:
        config, rope = self.config, self.live.inputs.architecture.rope
        eager = config.rollout.enforce_eager
        advice = advice_for(
            mean_abs,
            dtype=config.model.dtype,
            graphs=torch.cuda.is_available() and not eager,
            scaled_rope=rope.kind != "default",
            old_logprobs=config.objective.old_logprobs,
        )
        values = objective_settings(**config.objective.model_dump(include=LOSS_KEYS))
        sides = [values.get(key) for key in ("gate_low", "gate_high", "clip_low", "clip_high")]
        length = config.rollout.max_response_tokens
        scale = ((values.get("gate_reference_length") or length) / length) ** 0.5
        return self_check(probed, min(filter(None, sides), default=1.0) * scale, advice)

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
        stop = any_rank(self._stop, self.control)
        loop, prompts = self.config.objective, self.config.rollout.prompts
        updates = loop.epochs * prompts // loop.mini_batch
        if stop or (due(at.made, self.config.checkpoint.within_batch) and at.made < updates):
            self.checkpoints.save(at, flush_metrics=self.monitor.flush, wait=stop)
        if stop:
            self._say_stopped(f"update {at.update} of step {at.step + 1}")
        return stop

    def finish_step(self, step: int, update: int) -> bool:
        """Evaluate, export and save what is due; True to stop, with a checkpoint written."""
        config, last = self.config, step == self.config.steps
        at = self.position = replace(self.position, step=step, batch=None)
        self.watch.place = f"evaluating, exporting and saving step {step}"
        score = None
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
            score = metrics["eval/macro"]
        if step and (last or due(step, config.export.every)):
            self._export(step)
        stop = any_rank(self._stop, self.control)
        if step and (last or stop or due(step, config.checkpoint.every)):
            self.checkpoints.save(
                at,
                flush_metrics=self.monitor.flush,
                score=score,
                wait=last or stop,
                ahead=self._ahead_name,
            )
        if stop:
            self._say_stopped(f"step {step}")
        return stop

    def close(self) -> None:
        """Finish what is being written. Not collective."""
        self._ahead.close()
        self.checkpoints.close()
        self.store.close()
        self.monitor.close()

    def _collect(self, step: int) -> tuple[RolloutBatch, Metrics]:
        if self.replay is not None:
            return self.replay.read(step), {}
        stored = True
        sampled = self._ahead.take(step) or self._held(step)
        if sampled is None:
            sampled, stored = self._sample(step, self.live.prompts), False
        batch, self._note = sampled
        self._ahead_name = ""
        oldest = min(record.version for record in batch.records)
        if oldest < step - 1 - self.plan.max_lag:
            raise RolloutError(
                f"step {step}: a response of version {oldest}, more than rollout.max_lag = "
                f"{self.plan.max_lag} behind"
            )
        self.live.prompts.restore(json.loads(self._note["prompts"]))
        if not stored:
            self.store.write(batch, self._note)  # at once: a run killed from here on does not pay again
        metrics: Metrics = json.loads(self._note["metrics"])
        return batch, metrics | {"rollout/version_lag": float(step - 1 - oldest)}

    def _finish_ahead(self) -> None:
        """Wait for the batch that is sampled beside the updates, and store it: checkpoints name it."""
        if sampled := self._ahead.wait():
            batch, note = sampled
            self.store.write(batch, note)
            self._ahead_name = note["run"]

    def _sample(self, step: int, prompts: PromptSource | Mixture) -> tuple[RolloutBatch, dict[str, str]]:
        assert self.live.rewards is not None
        rollout = self.config.rollout
        settings = CollectSettings(
            prompts=rollout.prompts,
            group_size=rollout.group_size,
            sampling=self.live.inputs.sampling,
            seed=self.config.seed,
            advantage_std=self.config.objective.advantage_std,
            permute_rewards=self.config.reward.permute,
            max_fault_rate=self.config.reward.max_fault_rate,
            dynamic=rollout.dynamic_sampling,
            max_refills=rollout.max_refills,
            overlong=Overlong(rollout.overlong, rollout.overlong_buffer, rollout.overlong_penalty),
        )
        batch, metrics = collect(step, settings, prompts.take, self._sampler, self.live.rewards.start)
        note = {
            "run": self._identity(),
            "metrics": json.dumps(metrics),
            "prompts": json.dumps(prompts.position),
        }
        return batch, note

    def _held(self, step: int) -> tuple[RolloutBatch, dict[str, str]] | None:
        """The batch, if this run sampled it already: with these very weights, or ahead of its checkpoint."""
        names = [self._identity(), self._ahead_name]
        held = next((one for name in names if name and (one := self.store.held(step, name))), None)
        if held:
            self.monitor.say(f"step {step}: its rollouts are on the disk and are not sampled again")
        return held

    def _identity(self) -> str:
        """Names all that a batch depends on: weights, prompts, and how they are sampled and graded."""
        settings = {
            key: value
            for key, value in self.config.flat().items()
            if key.startswith(("seed", "rollout.", "reward.", "objective.advantage"))
            and not key.startswith(HARMLESS)
        }
        prompts = self.live.prompts.position["fingerprint"]
        parts = [self._sampler.weights_digest, prompts, asdict(self.live.inputs.sampling), settings]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

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
        inputs, folder = self.live.inputs, self.config.run.folder / "eval"
        request = {
            "weights": self._sampler.weights_digest,
            "benchmarks": {one.name: problems_digest(one) for one in inputs.benchmarks},
            "samples": self.config.eval.samples,
            "sampling": asdict(inputs.eval_sampling),
            "seed": self.config.seed,
        }
        progress = Progress(folder / f"step_{step:06d}.responses.jsonl", request, restart=True)
        result = evaluate(
            self._sampler,
            inputs.benchmarks,
            samples=self.config.eval.samples,
            sampling=inputs.eval_sampling,
            grade=self.live.rewards.start,
            seed=self.config.seed,
            progress=progress,
        )
        result.write(folder, step, request=request)
        progress.finish()
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

    def _announce(self, state: RunState | None) -> None:
        if not self.is_writer:
            return
        self.config.run.folder.mkdir(parents=True, exist_ok=True)
        (self.config.run.folder / "config.toml").write_text(self.config.to_toml(), encoding="utf-8")
        self.monitor.say(f"prompts: {self.live.inputs.loaded.summary}")
        self.monitor.say(self._gate_width())
        for benchmark in self.live.inputs.benchmarks:
            if seen := in_prompts(benchmark, self.live.inputs.prompts):
                self.monitor.say(warning(benchmark, seen, "data.prompts"))
        if state:
            self.monitor.say(f"resuming after {state.place}")

    def _gate_width(self) -> str:
        """What the tolerances mean at this length."""
        objective = self.config.objective
        values = objective_settings(**objective.model_dump(include=LOSS_KEYS))
        if "gate_low" not in values:
            return f"objective: {values}"
        return gate_width_in_sigmas(
            gate_low=values["gate_low"],
            gate_high=values["gate_high"],
            length=self.config.rollout.max_response_tokens,
            reference_length=values.get("gate_reference_length"),
        )

    @property
    def _sampler(self) -> EngineSampler:
        assert self.live.sampler is not None, "only rank 0 samples"
        return self.live.sampler

    def _say_stopped(self, place: str) -> None:
        self.monitor.say(f"stopped by a signal after {place}; start the same command again to go on")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True


def _correction(config: Config) -> Correction | None:
    rollout = config.rollout
    if rollout.correction == "none":
        return None
    return Correction(rollout.correction, rollout.correction_cap, rollout.correction_mask)


def due(step: int, every: int) -> bool:
    """Every `every` steps; 0 is never."""
    return every > 0 and step > 0 and step % every == 0
