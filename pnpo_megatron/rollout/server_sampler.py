"""Engines behind HTTP: one vLLM server a node, started by `pnpo-megatron serve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pnpo_megatron.rollout.sampler import EngineSampler, Worker
from pnpo_megatron.rollout.server_fleet import ServerFleet


class ServerSampler(EngineSampler):
    """Generates with servers that somebody else starts and ends."""

    def __init__(
        self,
        model_folder: Path | str,
        servers: Sequence[str],
        *,
        dtype: str,
        max_model_len: int,
        decode: Callable[[Sequence[int]], str],
        max_num_seqs: int = 256,
        routes: bool = False,
        initial_version: int | None = None,
        start_timeout_s: float = 600.0,
        generate_timeout_s: float = 3600.0,
        sync_timeout_s: float = 600.0,
        stream: bool = False,
    ) -> None:
        """Look for the servers; `wait_ready` (or the first use) waits until all of them answer.

        Args:
            model_folder: the folder that they were started with.
            servers: `http://HOST:PORT` of each.
            dtype: the servers', e.g. "float32" or "bfloat16".
            max_model_len, max_num_seqs: as the servers have them, or less.
            routes: they have to tell the experts of every token.
            decode, initial_version, start_timeout_s, generate_timeout_s, sync_timeout_s: as in EngineSampler.
            stream: weights go by NCCL.

        Raises:
            ConfigError: the folder cannot be sampled from with these settings.
        """
        self._urls, self._dtype, self._max_num_seqs, self._routes = servers, dtype, max_num_seqs, routes
        super().__init__(
            Path(model_folder),
            max_model_len=max_model_len,
            decode=decode,
            initial_version=initial_version,
            start_timeout_s=start_timeout_s,
            generate_timeout_s=generate_timeout_s,
            sync_timeout_s=sync_timeout_s,
            stream=stream,
        )

    def _connect(self) -> Worker:
        return ServerFleet(
            self._urls,
            self._sender.fd,
            dtype=self._dtype,
            max_model_len=self._max_model_len,
            max_num_seqs=self._max_num_seqs,
            timeout_s=self.sync_timeout_s,
            routes=self._routes,
        )

    def _lend(self, packed: Tensor) -> Tensor:
        torch.cuda.synchronize(packed.device)  # another thread sends it
        return packed
