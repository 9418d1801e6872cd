"""An engine in a child process of this one. Never imports vllm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from pnpo_megatron.rollout.colocation import Part
from pnpo_megatron.rollout.messages import EngineSettings, Sleep, Wake
from pnpo_megatron.rollout.sampler import EngineSampler, Worker
from pnpo_megatron.rollout.weight_stream import ipc_handle
from pnpo_megatron.rollout.worker_process import WorkerProcess, worker_environment


def engine_settings(
    folder: Path | str,
    *,
    dtype: str,
    max_model_len: int,
    kv_cache_memory_bytes: int,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 4096,
    enforce_eager: bool = True,
    device: Literal["cpu", "cuda"] = "cpu",
    sleep_mode: bool = False,
    routes: bool = False,
) -> EngineSettings:
    """Settings of an engine, the same for a child process and a server.

    Args:
        folder: HF folder with config.json and safetensors files.
        dtype: the engine's, e.g. "float32" or "bfloat16".
        max_model_len: prompt and response tokens of one sequence.
        kv_cache_memory_bytes: size of the key-value cache.
        max_num_seqs: sequences generated side by side.
        max_num_batched_tokens: tokens of one engine step; raised to what max_model_len needs.
        enforce_eager: no graph capture; keep it on CPUs.
        device: where the engine runs.
        sleep_mode: it shares its GPU with the learner (`VllmSampler.sleep`).
        routes: return the experts that every token was sent to.
    """
    return EngineSettings(
        model_folder=str(folder),
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_num_seqs=max_num_seqs,
        # Room for the longest whole prompt beside every running sequence: without chunks it would wait.
        max_num_batched_tokens=max(max_num_batched_tokens, max_model_len + max_num_seqs),
        # After part of a prefill vLLM rewinds a seeded request's generator, which a CPU generator cannot
        # do: the engine would die as soon as the prompts of a call exceed max_num_batched_tokens.
        chunked_prefill=device == "cuda",
        enforce_eager=enforce_eager,
        sleep_mode=sleep_mode,
        float32_head=device == "cuda",  # the CPU build packs the head and cannot cast it
        routes=routes,
    )


class VllmSampler(EngineSampler):
    """Generates with an engine in a child process, which starts at once and in the background."""

    def __init__(
        self,
        model_folder: Path | str,
        *,
        max_model_len: int,
        decode: Callable[[Sequence[int]], str],
        log_path: Path,
        device: Literal["cpu", "cuda"] = "cpu",
        threads: int = 1,
        initial_version: int | None = None,
        start_timeout_s: float = 600.0,
        generate_timeout_s: float = 3600.0,
        sync_timeout_s: float = 600.0,
        restarts: int = 2,
        stream: bool = False,
        **engine: Any,
    ) -> None:
        """Start the worker; `wait_ready` (or the first use) waits for it.

        Args:
            model_folder: HF folder with config.json and safetensors files.
            max_model_len, device: as in `engine_settings`, which takes `engine` too.
            decode: response ids to text, for rewards and people.
            log_path: file that takes the worker's output.
            threads: OpenMP threads of a CPU engine; more than 1 collide with the learner's.
            initial_version: version of the folder's own weights; None refuses generation until a sync.
            start_timeout_s, generate_timeout_s, sync_timeout_s: seconds allowed for each.
            restarts: times that a worker which dies is started again within one call.
            stream: weights go by CUDA IPC; learner and engine share a GPU.

        Raises:
            ConfigError: the folder cannot be sampled from with these settings.
        """
        self._settings = engine_settings(model_folder, max_model_len=max_model_len, device=device, **engine)
        self._environment, self._log_path = worker_environment(device, threads), log_path
        super().__init__(
            Path(model_folder),
            max_model_len=max_model_len,
            decode=decode,
            initial_version=initial_version,
            start_timeout_s=start_timeout_s,
            generate_timeout_s=generate_timeout_s,
            sync_timeout_s=sync_timeout_s,
            restarts=restarts,
            stream=stream,
        )

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
        self._worker.send(command)
        deadline = time.monotonic() + self.sync_timeout_s
        self._reply_to(command.call, deadline, f"{command} ({self.sync_timeout_s:g} s, sync_timeout_s)")

    def _connect(self) -> Worker:
        self._asleep = False
        return WorkerProcess(
            self._settings, self._sender.fd, self._environment, self._log_path, self.sync_timeout_s
        )

    def _lend(self, packed: Tensor) -> Any:
        return ipc_handle(packed)
