"""A time limit for pure-Python work that needs no signal, so that it holds in any thread (TRAPS H03)."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOOK_EVERY_S = 0.1
_WALL_FACTOR = 4.0
"""A busy machine may take this many times longer by the clock; the limit itself is the thread's CPU time."""


class TimeLimitError(BaseException):
    """Raised inside the limited block. A BaseException, so ``except Exception`` lets it pass."""


class _Watchdog:
    """Raises in the watched thread when time is up, again and again until the block is left."""

    def __init__(self, seconds: float) -> None:
        self._thread_id = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread_id)
        self._cpu_end = time.clock_gettime(self._clock) + seconds
        self._wall_end = time.monotonic() + _WALL_FACTOR * seconds
        self._left = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="grade-time-limit", daemon=True).start()

    def _watch(self) -> None:
        while not self._left.wait(_LOOK_EVERY_S):
            with self._lock:
                if self._left.is_set():  # the thread may be gone, and its clock with it
                    return
                if time.clock_gettime(self._clock) > self._cpu_end or time.monotonic() > self._wall_end:
                    self._raise(ctypes.py_object(TimeLimitError))

    def _raise(self, error: Any) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), error)

    def leave(self) -> None:
        """Stop watching and take back an error that was set but not raised yet."""
        with self._lock:
            self._left.set()
            self._raise(None)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimeLimitError` in this thread when the block takes more CPU seconds; None: no limit.

    Works between bytecodes: a single long C call (one huge integer power) is not interrupted, so callers
    keep those out by looking at the text first, and `RewardPool` has a process to kill behind it.
    """
    if seconds is None:
        yield
        return
    watchdog = _Watchdog(seconds)
    try:
        yield
    finally:
        try:
            watchdog.leave()
        except TimeLimitError:  # it landed between the last line of the block and leave()
            watchdog.leave()
            raise
