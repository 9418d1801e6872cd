"""Weights from GPU to GPU, some tensors at a time: CUDA IPC to the child process, NCCL to servers.

Nothing here has run on a GPU yet. NCCL is spoken by ctypes, because torch's process groups cannot join the
communicators that vLLM's workers make.
"""

import base64
import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.messages import TensorEntry
from pnpo_megatron.rollout.weight_transfer import bytes_of, describe, only_expected

BUCKET_BYTES = 256 * 2**20
"""Packed bytes that lie on the GPU beside the model; a larger tensor has a bucket of its own."""
ONE_BUFFER = 2**62
"""vLLM cuts what it receives at this size: never, so that a bucket is one broadcast."""


def buckets(
    tensors: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[tuple[TensorEntry, ...], Tensor]]:
    """The tensors in their order, packed: manifest and [n] uint8, on the tensors' own device.

    Raises:
        RolloutError: as `only_expected`, or a tensor is not finite.
    """
    entries: list[TensorEntry] = []
    parts: list[Tensor] = []
    size = 0
    for name, tensor in only_expected(tensors, expected):
        part = bytes_of(tensor.detach().contiguous())
        askew = size % tensor.element_size()  # vLLM could not read it where it would lie
        if parts and (askew or size + part.numel() > BUCKET_BYTES):
            yield tuple(entries), torch.cat(parts)
            entries, parts, size = [], [], 0
        entries.append(describe(name, tensor.detach().contiguous(), size))
        parts.append(part)
        size += part.numel()
    if parts:
        yield tuple(entries), torch.cat(parts)


def ipc_fields(entries: Sequence[TensorEntry]) -> dict[str, list[Any]]:
    """What vLLM's CUDA-IPC engine wants to know of packed tensors."""
    return {
        "names": [entry.name for entry in entries],
        "dtype_names": [entry.dtype for entry in entries],
        "shapes": [list(entry.shape) for entry in entries],
        "tensor_sizes": [prod(entry.shape) * getattr(torch, entry.dtype).itemsize for entry in entries],
    }


def ipc_handle(packed: Tensor) -> dict[str, tuple[Any, ...]]:
    """What opens these bytes in another process on the same GPU, by the GPU's name."""
    torch.cuda.synchronize(packed.device)
    torch.cuda.ipc_collect()  # the buckets before, which the other process has let go of
    _, arguments = reduce_tensor(packed)
    return {str(torch.cuda.get_device_properties(packed.device).uuid): arguments}


class UniqueId(ctypes.Structure):
    """Names a communicator that is about to be."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


POINTER, INT, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
SIGNATURES: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(POINTER), INT, UniqueId, INT],
    "ncclAllReduce": [POINTER, POINTER, SIZE, INT, INT, POINTER, POINTER],
    "ncclBroadcast": [POINTER, POINTER, SIZE, INT, INT, POINTER, POINTER],
    "ncclCommAbort": [POINTER],
}
UINT8, FLOAT32, SUM = 1, 7, 0
"""Of nccl.h."""


def load_nccl() -> Any:
    """The library that torch has loaded already."""
    library = ctypes.CDLL("libnccl.so.2")
    for name, types in SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


class Broadcaster:
    """Rank 0 of a communicator whose other ranks are the workers of rollout servers.

    `join` and `broadcast` return when all of them have done their part: call them in threads, since a worker
    that does not come is waited for until `abort`.
    """

    def __init__(self, workers: int) -> None:
        """Name a communicator with so many workers; it is not there before `join`."""
        self._nccl, self._comm, self._size = load_nccl(), POINTER(), workers + 1
        self._device = torch.cuda.current_device()
        self._id = UniqueId()
        self._do("ncclGetUniqueId", ctypes.byref(self._id))

    def invitation(self, first_rank: int) -> dict[str, Any]:
        """vLLM's NCCLWeightTransferInitInfo for a server whose workers take ranks from `first_rank` on."""
        return {
            "nccl_unique_id_b64": base64.b64encode(bytes(self._id)).decode(),
            "rank_offset": first_rank,
            "world_size": self._size,
            "packed": True,
            "packed_buffer_size_bytes": ONE_BUFFER,
            "packed_num_buffers": 1,
        }

    def join(self) -> None:
        """Meet the workers, and add up one number with them, as they do with whom they meet."""
        with torch.cuda.device(self._device):
            self._do("ncclCommInitRank", ctypes.byref(self._comm), self._size, self._id, 0)
            self._collective("ncclAllReduce", torch.zeros(1, device="cuda"), FLOAT32, SUM)

    def broadcast(self, packed: Tensor) -> None:
        """Give [n] uint8 to every worker."""
        with torch.cuda.device(self._device):
            self._collective("ncclBroadcast", packed, UINT8, 0)

    def abort(self) -> None:
        """Leave, and let go of whatever waits here."""
        if self._comm:
            self._nccl.ncclCommAbort(self._comm)
            self._comm = POINTER()

    def _collective(self, name: str, data: Tensor, dtype: int, root_or_operation: int) -> None:
        stream, address = torch.cuda.current_stream(), data.data_ptr()
        self._do(
            name, address, address, data.numel(), dtype, root_or_operation, self._comm, stream.cuda_stream
        )
        stream.synchronize()

    def _do(self, name: str, *arguments: Any) -> None:
        code = getattr(self._nccl, name)(*arguments)
        if code:
            raise RolloutError(f"weight sync: {name} returned {code}; NCCL_DEBUG=WARN says why")
