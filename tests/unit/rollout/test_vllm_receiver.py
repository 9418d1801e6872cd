"""Our messages and bytes read by vLLM's own code, on CPU: its dataclasses, NCCL table and packed receivers.

Streams and mapped memory, which need a GPU, are replaced; what they carry is not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout import vllm_worker, weight_stream
from pnpo_megatron.rollout.messages import Done, Shutdown, WeightBucket
from pnpo_megatron.rollout.weight_network import SERVER_PID
from pnpo_megatron.rollout.weight_stream import UINT8, Broadcaster, buckets, ipc_fields

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # importing vLLM takes half a minute of CPU
TENSORS = {
    "embed.weight": torch.randn(7, 3).bfloat16(),  # 42 bytes: vLLM cannot read a float32 after them
    "layers.0.weight": torch.randn(30, 4),
    "layers.0.bias": torch.randn(5),
    "scale": torch.tensor(2.5, dtype=torch.float64),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


class Model(nn.Module):
    """Takes tensors as a vLLM model does, and notes them."""

    def __init__(self) -> None:
        super().__init__()
        for name in TENSORS:
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(1)))
        self.config = SimpleNamespace(tie_word_embeddings=False)
        self.got: dict[str, Tensor] = {}

    def load_weights(self, tensors: Any) -> set[str]:
        found = dict(tensors)
        self.got |= found
        return {name.replace(".", "_") for name in found}


@pytest.fixture(scope="module")
def transfer() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SERVER_PID, str(os.getpid()))  # its workers end with a server: here this process
        from pnpo_megatron.rollout import vllm_transfer
    return vllm_transfer


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Calls of the library, which is not there."""
    called: list[tuple[Any, ...]] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: called.append((name, *arguments)) or 0

    stream = SimpleNamespace(cuda_stream=11, synchronize=lambda: called.append(("wait",)))
    monkeypatch.setattr(weight_stream, "load_nccl", Library)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None: real(*size))
    yield called


def test_nccl_is_called_as_vllm_calls_it(transfer: ModuleType) -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, ncclDataTypeEnum

    theirs = {one.name: one for one in NCCLLibrary.exported_functions}
    for name, types in weight_stream.SIGNATURES.items():
        assert theirs[name].restype is ctypes.c_int  # what ctypes takes where nothing is said
        assert [ctypes.sizeof(one) for one in types] == [ctypes.sizeof(one) for one in theirs[name].argtypes]
    assert (ncclDataTypeEnum.ncclUint8, ncclDataTypeEnum.ncclFloat32) == (UINT8, weight_stream.FLOAT32)


def test_the_sender_is_rank_0_and_greets_as_vllms_workers_do(nccl: list[tuple[Any, ...]]) -> None:
    sender = Broadcaster(5)
    sender.join()
    packed = torch.arange(24, dtype=torch.uint8)
    sender.broadcast(packed)
    address = packed.data_ptr()
    sender._comm = ctypes.c_void_p(77)
    sender.abort()
    sender.abort()
    (_, _), (init, _, size, _, rank), greeting, wait, sent, _, end = nccl
    assert (init, size, rank, wait) == ("ncclCommInitRank", 6, 0, ("wait",))
    assert (greeting[0], *greeting[3:6], greeting[7]) == ("ncclAllReduce", 1, 7, 0, 11)
    assert (*sent[:6], sent[7]) == ("ncclBroadcast", address, address, 24, UINT8, 0, 11)
    assert end[0] == "ncclCommAbort"


def test_vllm_parses_the_invitation(transfer: ModuleType, nccl: list[tuple[Any, ...]]) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    sender = Broadcaster(5)
    ctypes.memset(ctypes.byref(sender._id), 0xA5, 128)
    engine = object.__new__(NCCLWeightTransferEngine)
    info = engine.parse_init_info(sender.invitation(3))
    assert (info.rank_offset, info.world_size, info.packed) == (3, 6, True)
    assert info.nccl_unique_id_bytes == b"\xa5" * 128
    with pytest.raises(ValueError, match="Invalid init_info"):
        engine.parse_init_info(sender.invitation(3) | {"rank": 3})


@pytest.fixture
def receiver(transfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our engine in a server's worker, on CPU, with a model and a communicator that were not built."""
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.model_executor.model_loader import reload

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda index, count: (stream,) * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    steps: list[str] = []
    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: steps.append("begin"))
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: steps.append("end"))
    engine = object.__new__(transfer.Receiver)
    engine.model, engine.model_config, engine.device = Model(), None, torch.device("cpu")
    engine.packed_buffer_size_bytes, engine.packed_num_buffers = weight_stream.ONE_BUFFER, 1
    engine.model_update_group = SimpleNamespace(broadcast=None, destroy=lambda: steps.append("left"))
    engine.steps = steps
    return engine


def send(receiver: Any, entries: Any, packed: Tensor) -> None:
    """One bucket as a server's worker gets it: JSON, and a broadcast into memory that vLLM has made."""

    def broadcast(into: Tensor, src: int) -> None:
        assert (into.numel(), src) == (packed.numel(), 0)
        into.copy_(packed)

    receiver.model_update_group.broadcast = broadcast
    receiver.update_weights({"entries": [one.__dict__ | {"shape": list(one.shape)} for one in entries]})


@pytest.mark.parametrize("limit", [1, 200, 2**20])
def test_a_server_s_worker_unpacks_every_tensor(
    receiver: Any, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", limit)
    receiver.start_weight_update()
    for entries, packed in buckets(TENSORS.items(), SHAPES):
        send(receiver, entries, packed)
    receiver.update_weights({"entries": []})
    receiver.finish_weight_update()
    assert receiver.steps == ["begin", "end", "left"]
    assert list(receiver.model.got) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert receiver.model.got[name].dtype == tensor.dtype
        assert torch.equal(receiver.model.got[name], tensor)


def test_a_server_s_worker_takes_neither_changed_bytes_nor_half_a_model(receiver: Any) -> None:
    _, (entries, packed), *_ = buckets(TENSORS.items(), SHAPES)
    receiver.start_weight_update()
    changed = packed.clone()
    changed[300] += 1
    with pytest.raises(RolloutError, match=r"bytes of layers\.0\.weight changed"):
        send(receiver, entries, changed)
    receiver.start_weight_update()
    send(receiver, entries[:1], packed[:480])
    with pytest.raises(
        RolloutError, match=r"parameters \['embed_weight', 'layers_0_bias', 'scale'\] were set by no tensor"
    ):
        receiver.update_weights({"entries": []})


def test_the_child_process_opens_what_it_is_lent(
    transfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 500)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(packed_tensor.PackedBufferImporter, "rebuild", lambda self, arguments: arguments[0])
    staging = torch.empty(4096, dtype=torch.uint8)  # the same memory for every bucket: copies must be taken
    sent = list(buckets(TENSORS.items(), SHAPES))
    assert len(sent) == 3
    waiting: list[Any] = [WeightBucket(4, entries, packed) for entries, packed in sent] + [
        WeightBucket(4, (), None)
    ]
    replies: list[Any] = []

    def receive() -> Any:
        bucket = waiting.pop(0)
        if not isinstance(bucket, WeightBucket) or not bucket.entries:
            return bucket
        staging[: bucket.content.numel()].copy_(bucket.content)
        handle = {"GPU-1": (staging, *range(6))}  # the seventh is the device, which vLLM sets
        IPCWeightTransferUpdateInfo(**ipc_fields(bucket.entries), ipc_handles=handle)
        return WeightBucket(bucket.call, bucket.entries, handle)

    found = dict(vllm_worker.ipc_tensors(4, SimpleNamespace(recv=receive), replies.append))  # type: ignore[arg-type]
    assert replies == [Done(4)] * 4
    assert list(found) == list(TENSORS)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    waiting = [Shutdown()]
    with pytest.raises(EOFError):
        list(vllm_worker.ipc_tensors(5, SimpleNamespace(recv=receive), replies.append))  # type: ignore[arg-type]
