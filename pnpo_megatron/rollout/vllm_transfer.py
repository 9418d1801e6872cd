"""Worker side of a rollout server's weight sync: registered with vLLM, called over its own HTTP routes.

vLLM imports this module in every worker process, because the launcher names `Extension` as worker extension.
"""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

from pnpo_megatron.rollout.messages import TensorEntry
from pnpo_megatron.rollout.vllm_worker import begin_reload, end_reload, load_model
from pnpo_megatron.rollout.weight_network import BACKEND, SERVER_PID, receive
from pnpo_megatron.rollout.weight_transfer import verified


class Extension:
    """Adds nothing to a worker: naming it is what has this module imported there."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Tensors, and where their bytes are: the whole model at `source`, or some of it, broadcast next.

    No tensors: what was broadcast is the whole model.
    """

    entries: list[dict[str, Any]]
    source: dict[str, Any] | None = None
    nbytes: int = 0


class Receiver(NCCLWeightTransferEngine):
    """vLLM's NCCL engine with our manifest; without a broadcast it needs no GPU, and no communicator."""

    update_info_cls = UpdateInfo  # type: ignore[assignment]

    def start_weight_update(self) -> None:
        """The first tensors make ready for themselves."""
        self._unset: set[str] | None = None

    def finish_weight_update(self) -> None:
        """A sync that is whole has ended already, and one cut short must not end well."""

    def receive_weights(self, update_info: UpdateInfo) -> None:  # type: ignore[override]
        """Take the bytes, check every tensor's checksum, and load this worker's part of each."""
        entries = [TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in update_info.entries]
        if update_info.source is not None:
            with receive(update_info.source, update_info.nbytes) as receiver:
                load_model(self.model, self.model_config, receiver.tensors(entries))
        elif entries:
            self._receive_broadcast({entry.name: entry for entry in entries})
        else:
            try:
                end_reload(self.model, self.model_config, self._unset or set())
            finally:
                self.shutdown()

    def _receive_broadcast(self, entries: Mapping[str, TensorEntry]) -> None:
        if self._unset is None:
            self._unset = begin_reload(self.model)
        unset = self._unset

        def load(tensors: list[tuple[str, Tensor]]) -> None:
            checked = [(name, verified(entries[name], tensor)) for name, tensor in tensors]
            unset.difference_update(self.model.load_weights(checked))  # type: ignore[operator]

        packed_nccl_broadcast_consumer(
            iterator=((name, (list(one.shape), getattr(torch, one.dtype))) for name, one in entries.items()),
            group=self.model_update_group,
            src=0,
            post_unpack_func=load,
            buffer_size_bytes=self.packed_buffer_size_bytes,
            num_buffers=self.packed_num_buffers,
            device=self.device,
        )


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
WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
