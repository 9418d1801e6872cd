"""The weights that a run began with, kept on the host: the reference of `objective.kl_coef`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class FirstWeights:
    """A copy of this rank's part of the weights."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Made from what the chunks hold now."""
        named = (
            one
            for chunk in chunks
            for pairs in (chunk.named_parameters(), chunk.named_buffers())
            for one in pairs
        )
        self._live = [one.detach() for _, one in named]
        self._first = _on_host(self._live)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """The first weights instead of the present ones, which come back bit for bit."""
        present = _on_host(self._live)
        _put(self._first, self._live)
        try:
            yield
        finally:
            _put(present, self._live)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.to("cpu", copy=True) for one in tensors]


def _put(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for value, tensor in zip(values, tensors, strict=True):
        tensor.copy_(value)
