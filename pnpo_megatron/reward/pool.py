"""Grading processes with a deadline for every grade; results arrive as futures while others still generate.

A grade that passes its deadline is killed and tried once more when nothing else runs (the machine may have
been busy); a second time makes it wrong: reward 0, counted as a timeout. A worker that dies, or a function
that raises or returns no finite number, is a fault: value None (DECISIONS: Denominators, TRAPS H03).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from pnpo_megatron.errors import ConfigError, RewardFaultError
from pnpo_megatron.reward.process import START_TIMEOUT_S, GradingProcess
from pnpo_megatron.reward_types import RewardInput, RewardResult

MAX_FAILED_STARTS = 3
DEFAULT_MEMORY_BYTES = 4 << 30


@dataclass
class _Job:
    sample: RewardInput
    future: Future[RewardResult]
    alone: bool = False


class RewardPool:
    """Grades samples with ``"math"``, a ``"module:function"``, or several of them with weights.

    Safe to use from any thread, process or event loop (``asyncio.wrap_future``). Close it when done.
    """

    def __init__(
        self,
        function: str | Mapping[str, float] = "math",
        *,
        workers: int | None = None,
        timeout_s: float = 10.0,
        memory_bytes: int | None = DEFAULT_MEMORY_BYTES,
    ) -> None:
        """Start the workers and wait until they have loaded the function.

        Args:
            function: one name, or names with weights whose weighted sum is the reward.
            workers: processes; None: one a core, at most 8.
            timeout_s: deadline of one grade, in seconds.
            memory_bytes: address-space limit of a worker; None, which a function on a GPU needs: no limit.

        Raises:
            ConfigError: a setting is out of range, or the function cannot be loaded.
        """
        weights = {function: 1.0} if isinstance(function, str) else dict(function)
        count = workers if workers is not None else min(len(os.sched_getaffinity(0)), 8)
        if count < 1 or timeout_s <= 0 or not weights:
            raise ConfigError(
                f"reward.workers = {count}, reward.timeout_s = {timeout_s}, reward.function = {function!r}: "
                "use at least 1 worker, a positive time limit such as 10, and at least one function"
            )
        self._timeout_s = timeout_s
        self._queue: deque[_Job] = deque()
        self._retries: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._broken = ""
        self._failed_starts = 0
        self._started = threading.Event()
        self._wake_reader, self._wake_writer = Pipe(duplex=False)
        self._wake_pending = False
        self._jobs: dict[GradingProcess, _Job] = {}
        self._workers = [GradingProcess(weights, timeout_s, memory_bytes) for _ in range(count)]
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()
        started = self._started.wait(START_TIMEOUT_S * (MAX_FAILED_STARTS + 1))
        if not started or self._broken:
            self.close()
            raise ConfigError(f"reward.function: {self._broken or 'the workers did not start in time'}")

    def submit(self, inputs: Iterable[RewardInput]) -> list[Future[RewardResult]]:
        """Queue samples and return their futures, in order, at once.

        A future never raises for a bad sample; it raises `RewardFaultError` when no worker can be
        started any more.
        """
        jobs = [_Job(sample, Future()) for sample in inputs]
        with self._lock:
            if self._closing:
                raise RuntimeError("this RewardPool is closed; make a new one")
            self._queue.extend(jobs)
        self._wake()
        return [job.future for job in jobs]

    def start(self, inputs: Sequence[RewardInput]) -> Callable[[], list[RewardResult]]:
        """Submit now; the returned function waits for the results, in order."""
        futures = self.submit(inputs)
        return lambda: self._wait(futures)

    def grade(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Submit and wait."""
        return self.start(inputs)()

    def _wait(self, futures: Sequence[Future[RewardResult]]) -> list[RewardResult]:
        """Bounded: a grade takes its deadline twice at most, and the ones before it in the queue likewise."""
        with self._lock:
            ahead = len(self._queue) + len(futures) + len(self._workers)
        end = time.monotonic() + START_TIMEOUT_S * (MAX_FAILED_STARTS + 1) + 3 * self._timeout_s * ahead
        return [future.result(timeout=max(end - time.monotonic(), 0.0)) for future in futures]

    def close(self) -> None:
        """End the workers. Futures that are not done are cancelled."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(timeout=30.0)
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wake(self) -> None:
        with self._lock:
            if not self._wake_pending and not self._wake_writer.closed:
                self._wake_pending = True
                self._wake_writer.send_bytes(b"1")

    # Everything below runs in the pool's own thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._assign()
                self._receive()
                self._expire()
        finally:
            self._fail_all("the RewardPool was closed before this grade")
            with self._lock:
                self._wake_writer.close()
            self._wake_reader.close()
            self._started.set()

    def _assign(self) -> None:
        if any(job.alone for job in self._jobs.values()):
            return
        for worker in self._workers:
            if worker.idle and (job := self._next_job()):
                if job.alone or job.future.set_running_or_notify_cancel():
                    self._jobs[worker] = job
                    worker.send(job.sample, self._timeout_s)
                if job.alone:
                    return

    def _next_job(self) -> _Job | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
        if self._retries and not self._jobs:
            job = self._retries.popleft()
            job.alone = True
            return job
        return None

    def _receive(self) -> None:
        sources = {worker.connection: worker for worker in self._workers}
        next_deadline = min(worker.deadline for worker in self._workers)
        pause = None if next_deadline == float("inf") else max(next_deadline - time.monotonic(), 0.0)
        for source in wait([self._wake_reader, *sources], timeout=pause):
            if source is self._wake_reader:
                with self._lock:
                    self._wake_reader.recv_bytes()
                    self._wake_pending = False
            elif isinstance(source, Connection):
                self._read(sources[source])

    def _read(self, worker: GradingProcess) -> None:
        was_starting = worker.starting
        try:
            message = worker.receive()
        except (EOFError, OSError):
            self._worker_died(worker, was_starting)
            return
        if was_starting:
            self._worker_started(*message)
        else:
            value, fault, answer = message
            self._finish(worker, RewardResult(value, fault=fault, answer=answer))

    def _worker_started(self, state: str, why: str) -> None:
        if state == "failed":
            self._break(why)
            return
        self._failed_starts = 0
        if not any(worker.starting for worker in self._workers):
            self._started.set()

    def _worker_died(self, worker: GradingProcess, was_starting: bool) -> None:
        code = worker.kill(grace_s=1.0)
        if worker in self._jobs:
            self._finish(worker, RewardResult(None, fault=f"the grading worker died (exit code {code})"))
        if was_starting:
            self._start_failed(f"a grading worker died while starting (exit code {code})")
        worker.start()

    def _start_failed(self, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._break(f"{why}, {self._failed_starts} times in a row")

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.deadline > now:
                continue
            was_starting = worker.starting
            worker.kill()
            if was_starting:
                self._start_failed(f"a grading worker was not ready after {START_TIMEOUT_S:.0f} s")
            else:
                self._timed_out(worker)
            worker.start()

    def _timed_out(self, worker: GradingProcess) -> None:
        if self._jobs[worker].alone:
            self._finish(worker, RewardResult(0.0, timed_out=True))
        else:
            self._retries.append(self._jobs.pop(worker))

    def _finish(self, worker: GradingProcess, result: RewardResult) -> None:
        self._jobs.pop(worker).future.set_result(result)

    def _break(self, why: str) -> None:
        self._broken = why
        self._fail_all(f"rewards cannot be computed: {why}")
        self._closing = True

    def _fail_all(self, why: str) -> None:
        with self._lock:
            jobs = [*self._queue, *self._retries, *self._jobs.values()]
            self._queue.clear()
        self._retries.clear()
        self._jobs.clear()
        for job in jobs:
            if not job.future.cancel():
                job.future.set_exception(RewardFaultError(why))
