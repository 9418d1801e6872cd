"""Worker side of a rollout server's weight sync: registered with vLLM, called over its own HTTP routes.

vLLM imports this module in every worker process, because the launcher names `Extension` as worker extension.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from pnpo_megatron.rollout.messages import TensorEntry
from pnpo_megatron.rollout.vllm_worker import load_model
from pnpo_megatron.rollout.weight_network import BACKEND, SERVER_PID, receive


class Extension:
    """Adds nothing to a worker: naming it is what has this module imported there."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One whole model: where its bytes are, and what they are."""

    source: dict[str, Any]
    nbytes: int
    entries: list[dict[str, Any]]


class WholeModel(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads all weights in one call, so that a sync cut short never leaves a layer half loaded."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Every update brings its own address."""

    def start_weight_update(self) -> None:
        """`receive_weights` does it all."""

    def finish_weight_update(self) -> None:
        """`receive_weights` did it all."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Fetch the bytes, check every tensor's checksum, and load this worker's part of each."""
        entries = [TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in update_info.entries]
        with receive(update_info.source, update_info.nbytes) as receiver:
            load_model(self.model, self.model_config, receiver.tensors(entries))

    def shutdown(self) -> None:
        """Nothing stays open between updates."""


def die_with_server(server: int) -> None:
    """End this worker and the process above it when the server's own process ends, however it ends.

    A killed server leaves vLLM's engine core behind, which waits for ever with the GPU's memory.
    """
    server_end, above = os.pidfd_open(server), os.pidfd_open(os.getppid())

    def watch() -> None:
        select.select([server_end], [], [])
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(above, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


die_with_server(int(os.environ[SERVER_PID]))
WeightTransferEngineFactory.register_engine(BACKEND, WholeModel)
