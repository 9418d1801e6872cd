"""What crosses the pipe between a sampler and its worker: plain values and arrays, errors as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pnpo_megatron.types import Sampling


@dataclass(frozen=True)
class PromptRequest:
    """One prompt and the seeds of its responses."""

    index: int
    ids: NDArray[np.int32]
    seeds: NDArray[np.int64]


# Trainer to worker.


@dataclass(frozen=True)
class Generate:
    """Sample every prompt; answered by GroupDone or PromptFailed for each, then Done."""

    call: int
    prompts: tuple[PromptRequest, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Abort:
    """Drop what is left of a call."""

    call: int


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in the shared buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    checksum: int


@dataclass(frozen=True)
class LoadWeights:
    """Replace all weights by the tensors of the shared buffer; answered by WeightsLoaded."""

    call: int
    version: int
    entries: tuple[TensorEntry, ...]
    nbytes: int


@dataclass(frozen=True)
class StreamWeights:
    """Replace all weights by those of the WeightBuckets to come; answered by Done."""

    call: int
    version: int


@dataclass(frozen=True)
class WeightBucket:
    """Some tensors, answered by Done. None at all: that was the last, answered by WeightsLoaded."""

    call: int
    entries: tuple[TensorEntry, ...]
    """Their places in the packed bytes."""
    content: Any
    """For servers the bytes, [n] uint8 on the GPU; for a child process what opens them there."""


@dataclass(frozen=True)
class Sleep:
    """Drop weights and cache; answered by Done. No version is in force until LoadWeights."""

    call: int


@dataclass(frozen=True)
class Wake:
    """Take memory for "weights" or "kv_cache" again; answered by Done."""

    call: int
    part: str


@dataclass(frozen=True)
class Shutdown:
    """End the engine and the process."""


# Worker to trainer.


@dataclass(frozen=True)
class Ready:
    """The engine can take requests."""

    seconds: float
    engine_version: str


@dataclass(frozen=True)
class Response:
    """One finished response."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    routes: NDArray[Any] | None
    """[tokens that the engine read, layers, k] experts: prompt and response, but for the last token."""


@dataclass(frozen=True)
class GroupDone:
    """All responses to one prompt, one after the other."""

    call: int
    index: int
    version: int | None
    ids: NDArray[np.int32]
    """[sum of lengths] response tokens."""
    logprobs: NDArray[np.float32]
    """[sum of lengths] nats, of the distribution sampled from."""
    lengths: NDArray[np.int64]
    finish_reasons: tuple[str, ...]
    routes: tuple[NDArray[Any], ...] = ()
    """Of every response, as `Response.routes`; empty if the engine does not tell."""

    @classmethod
    def of(cls, call: int, index: int, version: int | None, responses: Sequence[Response]) -> GroupDone:
        """Joined, in this order."""
        return cls(
            call,
            index,
            version,
            np.concatenate([one.ids for one in responses]),
            np.concatenate([one.logprobs for one in responses]),
            np.asarray([len(one.ids) for one in responses], dtype=np.int64),
            tuple(one.finish_reason for one in responses),
            tuple(one.routes for one in responses if one.routes is not None),
        )


@dataclass(frozen=True)
class PromptFailed:
    """The engine refused one prompt; the others go on."""

    call: int
    index: int
    error: str
    message: str


@dataclass(frozen=True)
class Done:
    """Nothing of this call is left in the engine, this bucket is taken, or the memory has changed."""

    call: int


@dataclass(frozen=True)
class WeightsLoaded:
    """The engine now holds these weights, and no cache of older ones."""

    call: int
    version: int
    tensors: int


@dataclass(frozen=True)
class WorkerError:
    """A command failed. `fatal` means that the worker ends."""

    call: int | None
    error: str
    message: str
    fatal: bool


Command: TypeAlias = Generate | Abort | LoadWeights | StreamWeights | WeightBucket | Sleep | Wake | Shutdown
Reply: TypeAlias = Ready | GroupDone | PromptFailed | Done | WeightsLoaded | WorkerError
