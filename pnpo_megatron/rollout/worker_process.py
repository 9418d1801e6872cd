"""Starts the worker in a clean environment, talks to it with deadlines, and explains its death."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pnpo_megatron
from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.messages import Command, Reply, Shutdown, WorkerError
from pnpo_megatron.rollout.settings import EngineSettings

LOG_LINES = 8
EXIT_WAIT_S = 1.0
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class WorkerDied(RolloutError):
    """The process has ended: another one can do what was asked of it."""


def worker_environment(device: str, threads: int) -> dict[str, str]:
    """The trainer's environment without its launcher's variables, with what the engine needs on `device`."""
    environment = {
        name: value for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }  # fmt: skip
    package = str(Path(pnpo_megatron.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH", "")]))
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        # Compiling one function of the sampler costs seconds, and so does importing the compiler, which the
        # second of these keeps out. kv_cache_memory_bytes sets the cache.
        environment |= {
            "OMP_NUM_THREADS": str(threads),
            "TORCH_COMPILE_DISABLE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return environment


class WorkerProcess:
    """One child process, in its own process group, that ends with this one."""

    def __init__(
        self,
        settings: EngineSettings,
        weights_fd: int,
        environment: dict[str, str],
        log: Path,
        send_timeout_s: float,
    ) -> None:
        """Start it and return at once. Its output goes to the end of `log`."""
        self._log = log
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(send_timeout_s) + 1, 0))
        lifeline, self._lifeline = os.pipe()
        descriptors = (theirs.fileno(), weights_fd, lifeline)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pnpo_megatron.rollout.worker_main",
                 *(str(value) for value in descriptors), str(os.getpid())],
                env=environment, pass_fds=descriptors, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        theirs.close()
        os.close(lifeline)
        self._conn = Connection(ours.detach())
        with contextlib.suppress(ConnectionError):  # it died at once: the first `receive` says why
            self._conn.send(settings)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def send(self, command: Command) -> None:
        """Send one command; RolloutError when the worker is dead or does not read."""
        try:
            self._conn.send(command)
        except BlockingIOError as error:
            raise self._failure(
                f"the rollout worker does not read: sending {type(command).__name__} passed its deadline"
            ) from error
        except OSError as error:
            raise self._death(f"sending {type(command).__name__}") from error

    def receive(self, deadline: float, waiting_for: str) -> Reply:
        """The next reply, by time.monotonic() = `deadline`. What has arrived already is always delivered.

        Raises:
            RolloutError: the worker died, ended with an error, or the deadline passed.
        """
        try:
            if not self._conn.poll(max(0.0, deadline - time.monotonic())):
                raise self._failure(f"the rollout worker passed its deadline: waited for {waiting_for}")
            reply: Reply = self._conn.recv()
        except (EOFError, ConnectionError) as error:
            raise self._death(f"waiting for {waiting_for}") from error
        if isinstance(reply, WorkerError) and reply.fatal:
            raise self._dead(
                f"the rollout worker stopped with {reply.error} while waiting for {waiting_for}: "
                f"{reply.message}"
            )
        return reply

    def close(self, timeout_s: float) -> None:
        """End the worker: asked first, killed with all that it started after `timeout_s`."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline < 0:
            return
        try:
            self._conn.send(Shutdown())
            self._process.wait(timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            self._kill()
        self._conn.close()
        os.close(lifeline)

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(EXIT_WAIT_S)

    def _death(self, doing: str) -> WorkerDied:
        try:
            code = self._process.wait(EXIT_WAIT_S)
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
        except subprocess.TimeoutExpired:
            how = "closed its pipe"
        return self._dead(f"the rollout worker (pid {self.pid}) {how} while {doing}")

    def _dead(self, message: str) -> WorkerDied:
        return WorkerDied(str(self._failure(message)))

    def _failure(self, message: str) -> RolloutError:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return RolloutError("\n  ".join([f"{message}. Last lines of {self._log}:", *lines]))
