"""The grading process: reads one sample at a time from its socket and answers with plain values.

It is a program of its own (``python -m``), not a fork or a spawn: it imports neither torch nor the caller's
main module, and it can be started from a thread, a daemonic pool process or an event loop alike.
"""

import importlib
import math
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from pnpo_megatron.reward_types import RewardInput

Score = tuple[float | None, str, str | None]
"""(value, fault, answer); value is None for a fault."""
RewardFunction = Callable[[RewardInput], Any]

_ORPHAN_MARGIN_S = 30.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Sent to the whole job at preemption; a grade in progress must still be finished. The closed socket
ends us."""


def load_function(name: str) -> RewardFunction:
    """The function named ``module:function``, or the maths grader for ``math``.

    Raises:
        ValueError: no such module, no such function, or not callable.
    """
    if name == "math":
        from pnpo_megatron.reward.math_answer import grade_sample
        from pnpo_megatron.reward.symbolic import load_math_verify

        load_math_verify()  # before the first deadline runs
        return grade_sample
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f'reward function {name!r}: expected "math" or "module:function"')
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"reward function {name!r} cannot be loaded: {error}; check name and PYTHONPATH"
        ) from error
    if not callable(function):
        raise ValueError(f"reward function {name!r} is a {type(function).__name__}; expected a function")
    return function  # type: ignore[no-any-return]


def score(functions: Mapping[str, tuple[RewardFunction, float]], sample: RewardInput) -> Score:
    """The weighted sum of all functions; the first one that fails makes it a fault."""
    total, answer = 0.0, None
    for name, (function, weight) in functions.items():
        try:
            found = function(sample)
            if name == "math":
                found, answer = found.correct, found.answer
            total += weight * _number(found)
        except Exception as error:  # the user's code: any failure is a fault, never a reward
            where = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"{name}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            return None, fault[:2000], None
    return total, "", answer


def _number(value: Any) -> float:
    if value is None or isinstance(value, str):
        raise TypeError(f"returned {value!r}; expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}; expected a finite number")
    return number


def serve(connection: Connection, weights: Mapping[str, float], timeout_s: float) -> None:
    """Answer samples until the other end closes. Sends ``("ready", "")`` or ``("failed", why)`` first."""
    try:
        functions = {name: (load_function(name), weight) for name, weight in weights.items()}
    except Exception as error:  # a user's module may fail in any way while it loads
        connection.send(("failed", str(error)))
        return
    connection.send(("ready", ""))
    while True:
        try:
            sample = connection.recv()
        except (EOFError, ConnectionError):
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _ORPHAN_MARGIN_S)  # if nobody is left to end us
        result = score(functions, sample)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(result)


def main() -> None:
    """Entry point of the process: the only argument is the socket's file descriptor."""
    connection = Connection(int(sys.argv[1]))
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    weights, timeout_s, memory_bytes = connection.recv()
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    sys.setrecursionlimit(3000)
    serve(connection, weights, timeout_s)


if __name__ == "__main__":
    main()
