"""HF-named tensors from one process to another through memory without a name.

The buffer is a Linux memfd: it is no file in /dev/shm, so nothing is left behind when either side is
killed, and the size limit of /dev/shm does not apply. A manifest (names, shapes, dtypes, offsets,
checksums) goes over the pipe; the bytes do not.
"""

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.messages import TensorEntry

ALIGNMENT = 64
BLOCK_WORDS = 64


def checksum(data: Tensor) -> int:
    """64-bit checksum of a [n] uint8 tensor: depends on every bit, and on the place of every 512-byte block.

    One pass at the speed of a sum. All weights are odd, so no change of one word can vanish modulo 2**64.
    """
    if data.storage_offset() % 8:
        data = data.clone()  # cannot be read in words where it lies
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    blocks = words[: words.numel() // BLOCK_WORDS * BLOCK_WORDS].view(-1, BLOCK_WORDS)
    tail = int.from_bytes(bytes(data[words.numel() * 8 :].tolist()), "little")
    return (tail + _weighted(blocks.sum(1), 2) + _weighted(words[blocks.numel() :], 6)) % 2**64


def _weighted(values: Tensor, factor: int) -> int:
    places = torch.arange(values.numel(), dtype=torch.int64, device=values.device)
    return int((values * (places * factor + 1)).sum())


def is_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite, in one pass: a NaN is both the least and the largest."""
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def only_expected(
    tensors: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, if they are a whole model: every name of `expected` once, in its shape.

    Raises:
        RolloutError: a tensor is missing, unexpected, sent twice, or of another shape.
    """
    sent: set[str] = set()
    for name, tensor in tensors:
        if name in sent or name not in expected:
            problem = "was sent twice" if name in sent else "is not a tensor of this model"
            raise RolloutError(f"weight sync: {name} {problem}; expected {len(expected)} HF names")
        if tuple(tensor.shape) != expected[name]:
            raise RolloutError(
                f"weight sync: {name} is {list(tensor.shape)}, the model folder has {list(expected[name])}; "
                "trim padding before sending"
            )
        sent.add(name)
        yield name, tensor
    if missing := sorted(expected.keys() - sent):
        raise RolloutError(
            f"weight sync: {len(sent)} tensors sent, {len(expected)} expected; missing "
            f"{', '.join(missing[:3])}. The exporter and the model folder disagree about the architecture"
        )


def describe(name: str, tensor: Tensor, offset: int) -> TensorEntry:
    """The manifest's line about a contiguous tensor; RolloutError if it is not finite."""
    if not is_finite(tensor):
        raise RolloutError(
            f"weight sync: {name} holds NaN or infinite values; the update before it went wrong"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, tuple(tensor.shape), dtype, offset, checksum(bytes_of(tensor)))


def bytes_of(tensor: Tensor) -> Tensor:
    """[n] uint8 of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def verified(entry: TensorEntry, tensor: Tensor) -> Tensor:
    """The tensor, if its bytes are those that the manifest tells of."""
    if checksum(bytes_of(tensor)) != entry.checksum:
        raise RolloutError(f"weight sync: the bytes of {entry.name} changed on the way (checksum differs)")
    return tensor


class WeightSender:
    """The trainer's end: owns the buffer and fills it, one whole model at a time."""

    def __init__(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Reserve address space for `expected` (name to shape); pages come only when they are written."""
        self.expected = dict(expected)
        self.capacity = sum(_aligned(8 * math.prod(shape)) for shape in self.expected.values())
        self.fd = os.memfd_create("pnpo_weights")
        os.ftruncate(self.fd, max(self.capacity, 1))
        self._buffer = torch.frombuffer(mmap.mmap(self.fd, max(self.capacity, 1)), dtype=torch.uint8)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[tuple[TensorEntry, ...], int]:
        """Copy every tensor into the buffer and describe it: (entries, bytes used).

        The receiver must be done with the former contents: call this only after its reply.

        Raises:
            RolloutError: a tensor is missing, unexpected, sent twice, of another shape, or not finite.
        """
        entries: list[Future[TensorEntry]] = []
        offset = 0
        with ThreadPoolExecutor(1, "describe-weights") as beside:  # while the next tensor is copied
            for name, tensor in only_expected(tensors, self.expected):
                entries.append(beside.submit(describe, name, self._copy(tensor, offset), offset))
                offset += _aligned(tensor.numel() * tensor.element_size())
        return tuple(entry.result() for entry in entries), offset

    def _copy(self, tensor: Tensor, offset: int) -> Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            os.posix_fallocate(self.fd, offset, nbytes)  # no memory left: OSError here, not a SIGBUS below
        data = self._buffer[offset : offset + nbytes]
        shared = data.view(tensor.dtype).view(tensor.shape)
        return shared.copy_(tensor.detach())

    def close(self) -> None:
        """Give the memory back; it goes when the receiver lets go of it too."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._buffer = torch.empty(0, dtype=torch.uint8)


class WeightReceiver:
    """The worker's end: tensors that lie in the sender's memory, valid until the reply is sent."""

    def __init__(self, fd: int) -> None:
        self._buffer = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)

    def tensors(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor as a view, once its checksum is right."""
        with ThreadPoolExecutor(1, "verify-weights") as beside:  # while the tensor before is loaded
            checked = [beside.submit(verified, entry, self._view(entry)) for entry in entries]
            for entry, tensor in zip(entries, checked, strict=True):
                yield entry.name, tensor.result()

    def _view(self, entry: TensorEntry) -> Tensor:
        dtype = getattr(torch, entry.dtype)
        data = self._buffer[entry.offset : entry.offset + math.prod(entry.shape) * dtype.itemsize]
        return data.view(dtype).view(entry.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
