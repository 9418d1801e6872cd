"""The next batch, sampled and graded in a thread while the learner updates (rollout.max_lag = 1)."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from pnpo_megatron.errors import RolloutError

T = TypeVar("T")


class Ahead(Generic[T]):
    """At most one batch under way. Between `begin` and `wait` nobody else may use sampler and graders."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: longest wait for a batch."""
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="next-batch")
        self._under_way: tuple[int, Future[T]] | None = None

    def begin(self, step: int, sample: Callable[[], T]) -> None:
        """Start sampling the batch of `step`."""
        self._under_way = step, self._thread.submit(sample)

    def wait(self) -> T | None:
        """The batch under way, when it is whole; it stays for `take`. None if there is none.

        Raises:
            RolloutError: it takes too long; whatever sampling and grading raise.
        """
        if self._under_way is None:
            return None
        step, batch = self._under_way
        try:
            return batch.result(self._timeout_s)
        except TimeoutError as error:
            raise RolloutError(f"step {step}: no whole batch after {self._timeout_s:g} s") from error

    def take(self, step: int) -> T | None:
        """Hand over the batch of `step`, if it is the one under way."""
        if self._under_way is None or self._under_way[0] != step:
            return None
        batch = self.wait()
        self._under_way = None
        return batch

    def close(self) -> None:
        """Forget what is under way; the thread ends with the engine."""
        self._under_way = None
        self._thread.shutdown(wait=False, cancel_futures=True)
