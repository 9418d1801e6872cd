"""The weight sync: the learner's weights to the engine, and whether both then say the same."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

from torch import Tensor

from pnpo_megatron.build import Live
from pnpo_megatron.config import Config
from pnpo_megatron.data.batching import mini_batches
from pnpo_megatron.loop import Metrics, scored_by
from pnpo_megatron.parallel.rank_zero import from_rank_zero
from pnpo_megatron.rollout.collect import probe
from pnpo_megatron.rollout.mismatch import check_mismatch, mismatch_metrics
from pnpo_megatron.run.notices import self_check_line
from pnpo_megatron.types import RolloutBatch

PROBE_TOKENS = 16
T = TypeVar("T")


def with_exported(live: Live, work: Callable[[Iterator[tuple[str, Tensor]]], T], doing: str) -> T:
    """Rank 0 works on the learner's full tensors, one by one. Collective, and so is each tensor's export:
    whatever becomes of the work, no rank is left alone in it."""
    tensors = live.learner.export_hf()

    def to_the_end() -> T:
        try:
            return work(tensors)
        finally:
            deque(tensors, maxlen=0)

    if live.groups.world_rank != 0:
        deque(tensors, maxlen=0)
    return from_rank_zero(to_the_end, live.groups.control, doing)


class WeightSync:
    """Sends weights and compares learner and engine on a few fresh tokens. Collective."""

    def __init__(
        self, config: Config, live: Live, finish_ahead: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """`finish_ahead`: on rank 0, wait until nothing is sampled any more."""
        self._config, self._live, self._finish_ahead, self._say = config, live, finish_ahead, say
        self._checked = False

    def __call__(self, step: int) -> Metrics:
        """Sync the weights of `step`.

        Raises:
            RolloutError: learner and engine hold different models.
        """
        live, control = self._live, self._live.groups.control
        if live.groups.world_rank == 0:
            live.engine.wait_ready()  # the engine's start is not part of a sync
        waiting = perf_counter()
        from_rank_zero(self._finish_ahead, control, "waiting for the next batch's responses")
        start = perf_counter()
        sending = f"sending weights of step {step}"
        switched = with_exported(live, lambda tensors: self._load(tensors, step), sending)
        seconds = perf_counter() - start
        probed = from_rank_zero(lambda: self._probe(step), control, "sampling to check the sync")
        together = mini_batches(probed, len(set(probed.groups)), mean="response", seed=(0,))
        probed = probed.with_old_logprobs(scored_by(live.learner.log_probs, together))
        gap = mismatch_metrics(probed)
        check_mismatch(gap, self._config.rollout.max_mismatch, f"after the sync of step {step}")
        if not self._checked:
            self._say(self_check_line(self._config, live.inputs, probed, gap["mismatch/mean_abs"]))
            self._checked = True
        waited = {"time/generate_wait_s": start - waiting} if self._config.rollout.max_lag else {}
        named = {key.replace("mismatch/", "mismatch/sync_"): value for key, value in gap.items()}
        # Where the engine's own log-probs are the old ones, the batch itself shows no difference.
        shown = gap if self._config.objective.old_logprobs == "rollout" else {}
        return {"time/sync_s": seconds, **waited, **named, **switched, **shown}

    def _load(self, tensors: Iterator[tuple[str, Tensor]], step: int) -> Metrics:
        live = self._live

        def load() -> None:
            live.engine.load_weights(tensors, version=step)

        if live.turns and live.memory:
            return live.turns.to_engine(live.memory, load)
        load()
        return {}

    def _probe(self, step: int) -> RolloutBatch:
        inputs = self._live.inputs
        sampling = replace(inputs.sampling, max_tokens=min(PROBE_TOKENS, inputs.sampling.max_tokens))
        prompts = inputs.loaded.prompts[: self._config.rollout.sync_check]
        return probe(step, prompts, self._live.engine, sampling, (self._config.seed, "probe", step))
