"""An engine in a child process of this one. Never imports vllm."""

from pathlib import Path
from typing import Any

from torch import Tensor

from pnpo_megatron.rollout.colocation import Part
from pnpo_megatron.rollout.messages import Sleep, Wake
from pnpo_megatron.rollout.sampler import EngineSampler, Worker
from pnpo_megatron.rollout.settings import SamplerSettings
from pnpo_megatron.rollout.weight_stream import ipc_handle
from pnpo_megatron.rollout.worker_process import WorkerProcess, worker_environment


class VllmSampler(EngineSampler):
    """Generates with an engine in a child process, which starts at once and in the background."""

    def __init__(self, settings: SamplerSettings, *, log_path: Path, threads: int = 1) -> None:
        """Start the worker; `wait_ready` (or the first use) waits for it.

        Args:
            log_path: file that takes the worker's output.
            threads: OpenMP threads of a CPU engine; more than 1 collide with the learner's.
        """
        self._environment = worker_environment(settings.engine.device, threads)
        self._log_path = log_path
        super().__init__(settings)

    @property
    def worker_pid(self) -> int:
        """Process id of the engine's process."""
        assert isinstance(self._worker, WorkerProcess)
        return self._worker.pid

    def sleep(self) -> None:
        """Give the GPU's memory back. Weights and cache are dropped: nothing is sampled before a sync."""
        self.wait_ready()
        self._drop_open_call()
        self.version, self._weights, self._holds_weights = None, None, False
        self._insist(lambda: self._change_memory(Sleep(self._next_call())))
        self._asleep = True

    def wake(self, part: Part) -> None:
        """Take the GPU's memory for the weights, then, after `load_weights`, for the cache."""
        self._insist(lambda: self._change_memory(Wake(self._next_call(), part)))

    def _change_memory(self, command: Sleep | Wake) -> None:
        if isinstance(command, Wake) and not self._asleep:
            return  # a worker started in the place of one that died holds all its memory already
        self._obeyed(command, str(command))

    def _connect(self) -> Worker:
        self._asleep = False
        return WorkerProcess(
            self.settings.engine,
            self._sender.fd,
            self._environment,
            self._log_path,
            self.settings.sync_timeout_s,
        )

    def _lend(self, packed: Tensor) -> Any:
        return ipc_handle(packed)
