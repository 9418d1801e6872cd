"""Engines behind HTTP: one vLLM server a node, started by `pnpo-megatron serve`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pnpo_megatron.rollout.sampler import EngineSampler, Worker
from pnpo_megatron.rollout.server_fleet import ServerFleet
from pnpo_megatron.rollout.settings import SamplerSettings


class ServerSampler(EngineSampler):
    """Generates with servers that somebody else starts, ends, and starts again."""

    def __init__(self, settings: SamplerSettings, servers: Sequence[str]) -> None:
        """Look for the `servers`, `http://HOST:PORT` of each; `wait_ready` waits until all of them answer."""
        self._urls = servers
        super().__init__(replace(settings, restarts=0))

    def _connect(self) -> Worker:
        return ServerFleet(
            self._urls, self._sender.fd, self.settings.engine, timeout_s=self.settings.sync_timeout_s
        )

    def _lend(self, packed: Tensor) -> Tensor:
        torch.cuda.synchronize(packed.device)  # another thread sends it
        return packed
