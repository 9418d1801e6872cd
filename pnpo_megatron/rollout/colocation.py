"""PURE: whose turn it is on a GPU that learner and engine share, and the order in which it changes hands.

    engine built ─► asleep ─► learner built                                          (`begin`)
    learner: gradients and optimizer away ─► engine: weights awake ─► sync ─► cache awake    (`to_engine`)
    engine: asleep, weights and cache dropped ─► learner: optimizer and gradients back      (`to_learner`)

In any other order one of the two meets a full GPU, or the engine samples from memory that holds no weights
(TRAPS H33). The learner keeps its parameters: it scores while the engine is awake.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Literal, TypeAlias

from pnpo_megatron.errors import RolloutError

if TYPE_CHECKING:
    from pnpo_megatron.policy.offload import LearnerMemory
    from pnpo_megatron.rollout.vllm_sampler import VllmSampler

Part: TypeAlias = Literal["weights", "kv_cache"]


class Turns:
    """Holds the order; a call that is not the next one is refused."""

    def __init__(self, engine: VllmSampler) -> None:
        self._engine = engine
        self._turn = "nobody"

    def begin(self) -> None:
        """Let the engine build itself while the GPU is empty, and sleep; then the learner may be built."""
        self._leave("nobody")
        self._engine.wait_ready()
        self._engine.sleep()
        self._turn = "learner"

    def to_engine(self, learner: LearnerMemory, send: Callable[[], None]) -> dict[str, float]:
        """Before anything is sampled: `send` syncs the learner's weights. Seconds of each part."""
        self._leave("learner")
        parts = {
            "time/offload_s": learner.offload,
            "time/wake_s": lambda: self._engine.wake("weights"),
            "time/send_s": send,
            "time/wake_cache_s": lambda: self._engine.wake("kv_cache"),
        }
        seconds = {name: _timed(part) for name, part in parts.items()}
        self._turn = "engine"
        return seconds

    def to_learner(self, learner: LearnerMemory) -> dict[str, float]:
        """Before an update. Seconds of each part."""
        self._leave("engine")
        seconds = {"time/sleep_s": _timed(self._engine.sleep), "time/reload_s": _timed(learner.reload)}
        self._turn = "learner"
        return seconds

    def _leave(self, expected: str) -> None:
        """Nobody has the turn until the whole change is made: after a failure nothing goes on."""
        turn, self._turn = self._turn, "between two"
        if turn != expected:
            raise RolloutError(f"rollout.colocated: it is the turn of {turn}, expected {expected}")


def _timed(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start
