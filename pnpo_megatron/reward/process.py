"""One grading process as its parent sees it: a socket, a state and a deadline."""

import math
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from pnpo_megatron.reward_types import RewardInput

START_TIMEOUT_S = 180.0
_SOCKET_TIMEOUT_S = 30
_EXIT_TIMEOUT_S = 10.0


class GradingProcess:
    """Starts, feeds, and kills one worker. Not thread-safe: the pool's own thread drives it."""

    def __init__(self, weights: Mapping[str, float], timeout_s: float, memory_bytes: int | None) -> None:
        self._settings = (dict(weights), timeout_s, memory_bytes)
        self.starting = True
        self.start()

    def start(self) -> None:
        """Start a fresh process; it is ready once its first message has come."""
        ours, theirs = socket.socketpair()
        for side in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a stopped worker must not stop the pool
            ours.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", _SOCKET_TIMEOUT_S, 0))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pnpo_megatron.reward.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "OMP_NUM_THREADS": "1",
                },
            )
        self.connection = Connection(ours.detach())
        self.starting, self.idle = True, False
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self._try_send(self._settings)

    def send(self, sample: RewardInput, timeout_s: float) -> None:
        """Hand over one sample and start its clock."""
        self.idle = False
        self.deadline = time.monotonic() + timeout_s
        self._try_send(sample)

    def _try_send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            self.deadline = time.monotonic()  # dead or stopped: the reader or the deadline finds out

    def receive(self) -> Any:
        """The message that is waiting.

        Raises:
            EOFError, OSError: the process is gone.
        """
        message = self.connection.recv()
        self.starting, self.idle, self.deadline = False, True, math.inf
        return message

    def kill(self, grace_s: float = 0.0) -> int | None:
        """End the process and return its exit code; one that is ending may take `grace_s` to say why."""
        self.connection.close()
        self.idle, self.deadline = False, math.inf
        if grace_s:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=grace_s)
        self._process.kill()
        return self._process.wait(timeout=_EXIT_TIMEOUT_S)
