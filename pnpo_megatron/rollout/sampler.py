"""The Sampler that the loop sees: checks prompts, sends weights, watches the clock. Never imports vllm.

It talks in messages to whatever generates: an engine in a child process (`vllm_sampler`) or servers
(`server_sampler`).
"""

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pnpo_megatron.convert.families import hf_shapes
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.errors import ConfigError, NoResponsesError, RolloutError
from pnpo_megatron.rollout.messages import (
    Abort,
    Done,
    Generate,
    GroupDone,
    LoadWeights,
    PromptFailed,
    PromptRequest,
    Ready,
    Reply,
    Sleep,
    StreamWeights,
    TensorEntry,
    Wake,
    WeightBucket,
    WeightsLoaded,
    WorkerError,
)
from pnpo_megatron.rollout.requests import check_call, make_request, refusal, unpack_group
from pnpo_megatron.rollout.settings import SamplerSettings
from pnpo_megatron.rollout.weight_stream import buckets
from pnpo_megatron.rollout.weight_transfer import WeightSender
from pnpo_megatron.rollout.worker_process import WorkerDied, WorkerProcess
from pnpo_megatron.types import Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from pnpo_megatron.rollout.server_fleet import ServerFleet

Worker: TypeAlias = "WorkerProcess | ServerFleet"
LOG = logging.getLogger(__name__)
CLOSE_S = 10.0
T = TypeVar("T")


class EngineSampler(ABC):
    """Generates with engines elsewhere, which start at once and in the background."""

    def __init__(self, settings: SamplerSettings) -> None:
        """Check the folder and connect; `wait_ready` (or the first use) waits for the engines.

        Raises:
            ConfigError: the folder cannot be sampled from with these settings.
        """
        engine = settings.engine
        architecture = HfFolder(Path(engine.model_folder)).architecture
        if engine.max_model_len > architecture.max_positions:
            raise ConfigError(
                f"max_model_len = {engine.max_model_len}: {engine.model_folder} has "
                f"{architecture.max_positions} positions; use at most that"
            )
        self.settings, self._vocab_size = settings, architecture.vocab
        self.version = settings.initial_version
        self._restarts = 0 if settings.stream else settings.restarts
        self._calls, self._ready = 0, False
        self._weights: tuple[int, tuple[TensorEntry, ...], int] | None = None  # in the sender's buffer
        self._holds_weights = False  # the worker, of that version
        self._open_call: int | None = None  # generating, and not yet read to its end
        self.failures: dict[str, str] = {}
        """Why prompts of the last `generate`, by id, gave no group; complete once its iterator has ended."""
        self._synced = False
        self.weights_digest = ""
        """Names the weights of the last sync by their checksums."""
        self._sender = WeightSender(hf_shapes(architecture))
        self._closing = False
        self._start()

    def wait_ready(self) -> None:
        """Wait until the engine can take requests, at most start_timeout_s after the start."""
        if not self._ready:
            waiting_for = f"the engine to start ({self.settings.start_timeout_s:g} s, start_timeout_s)"
            reply = self._worker.receive(self._started + self.settings.start_timeout_s, waiting_for)
            if not isinstance(reply, Ready):
                raise RolloutError(f"the rollout worker answered {type(reply).__name__} before it was ready")
            LOG.info("engine ready: vLLM %s, %.1f s", reply.engine_version, reply.seconds)
            self._ready = True

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by HF-named tensors and drop every cache.

        Raises:
            RolloutError: the set of tensors is not the model's, one is not finite, or the engine failed.
        """
        self.wait_ready()
        if self.settings.stream:
            entries = self._stream_weights(tensors, version)
        else:
            entries, nbytes = self._sender.write(tensors)
            self._drop_open_call()
            self.version = None  # until the engine says otherwise (TRAPS H33)
            self._weights = version, entries, nbytes
            self._insist(self._send_weights)
        self.version, self._synced = version, True
        names = repr([(entry.name, entry.checksum) for entry in entries])
        self.weights_digest = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: tuple[int | str, ...]
    ) -> Iterator[RolloutGroup]:
        """Start sampling `group_size` responses a prompt; yields groups as they finish, in any order.

        A prompt that cannot be sampled gives no group and is listed in `failures`. Leaving the iterator
        early, another `generate` and `load_weights` drop what is still being generated.

        Raises:
            RolloutError: no weights of a known version, every prompt failed, or the worker failed.
            ConfigError: temperature 0 with groups of more than one.
            DataError: two prompts share an id.
        """
        self.wait_ready()
        if self.version is None:
            raise RolloutError(
                "the engine holds no weights of a known version: call load_weights before generate"
            )
        check_call(prompts, group_size, sampling)
        longest = self.settings.engine.max_model_len
        reasons = [refusal(prompt, sampling, self._vocab_size, longest) for prompt in prompts]
        judged = list(zip(prompts, reasons, strict=True))
        self.failures = {prompt.id: reason for prompt, reason in judged if reason}
        requests = tuple(
            make_request(index, prompt, group_size, seed)
            for index, (prompt, reason) in enumerate(judged)
            if not reason
        )
        self._drop_open_call()
        call = self._insist(lambda: self._ask(requests, sampling))
        return self._groups(call, prompts, requests, sampling)

    def close(self) -> None:
        """End the engine and everything it started; a thread that samples meanwhile ends with an error."""
        self._closing = True
        self._worker.close(CLOSE_S if self._ready else 0.0)  # a starting worker does not listen yet
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _connect(self) -> Worker:
        """A worker that is starting, or the servers."""

    @abstractmethod
    def _lend(self, packed: Tensor) -> Any:
        """What a WeightBucket carries for these bytes, [n] uint8 on the GPU."""

    def _start(self) -> None:
        self._ready, self._holds_weights, self._started = False, False, time.monotonic()
        self._worker: Worker = self._connect()

    def _start_again(self, error: WorkerDied) -> None:
        """Another worker in the place of a dead one; it gets the weights before it is asked for anything."""
        if self._closing:
            raise error
        LOG.warning("%s; starting it again", str(error).splitlines()[0])
        self._worker.close(0.0)
        self._start()
        self.wait_ready()

    def _insist(self, work: Callable[[], T]) -> T:
        """Work with the worker that is there, or the one that takes a dead one's place."""
        for left in reversed(range(self._restarts + 1)):
            try:
                return work()
            except WorkerDied as error:
                if not left:
                    raise
                self._start_again(error)
        raise AssertionError("the last turn returns or raises")

    def _send_weights(self) -> None:
        assert self._weights is not None
        version, entries, nbytes = self._weights
        self._check_loaded(LoadWeights(self._next_call(), version, entries, nbytes), version, len(entries))
        self._holds_weights = True

    def _stream_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> tuple[TensorEntry, ...]:
        """Bucket by bucket: no copy is kept here, so a worker that dies cannot be given them again."""
        self._drop_open_call()
        self.version, call = None, self._next_call()
        sent: list[TensorEntry] = []
        self._obeyed(StreamWeights(call, version), _loading(version))
        for entries, packed in buckets(tensors, self._sender.expected):
            self._obeyed(WeightBucket(call, entries, self._lend(packed)), _loading(version))
            sent += entries
        self._check_loaded(WeightBucket(call, (), None), version, len(sent))
        return tuple(sent)

    def _check_loaded(self, command: LoadWeights | WeightBucket, version: int, tensors: int) -> None:
        reply = self._obeyed(command, _loading(version))
        if not isinstance(reply, WeightsLoaded) or (reply.version, reply.tensors) != (version, tensors):
            raise RolloutError(f"weight sync: the worker answered {reply}, expected version {version}")

    def _obeyed(
        self, command: LoadWeights | StreamWeights | WeightBucket | Sleep | Wake, waiting_for: str
    ) -> Reply:
        self._worker.send(command)
        limit = self.settings.sync_timeout_s
        waiting_for = f"{waiting_for} ({limit:g} s, sync_timeout_s)"
        return self._reply_to(command.call, time.monotonic() + limit, waiting_for)

    def _ask(self, requests: tuple[PromptRequest, ...], sampling: Sampling) -> int:
        """Start generating; the number of the call."""
        if self._weights and not self._holds_weights:
            self._send_weights()
        call = self._open_call = self._next_call()
        self._worker.send(Generate(call, requests, sampling))
        return call

    def _groups(
        self,
        call: int,
        prompts: Sequence[Prompt],
        requests: tuple[PromptRequest, ...],
        sampling: Sampling,
    ) -> Iterator[RolloutGroup]:
        waiting = {request.index: request for request in requests}
        deadline, restarts, done = time.monotonic() + self.settings.generate_timeout_s, self._restarts, 0
        try:
            while True:
                try:
                    reply = self._generated(call, deadline, done, len(requests))
                except WorkerDied as error:
                    if not restarts:
                        raise
                    restarts -= 1
                    self._start_again(error)
                    # What is left is sampled with the same seeds, so to the same tokens.
                    call = self._ask(tuple(waiting.values()), sampling)
                    deadline = time.monotonic() + self.settings.generate_timeout_s
                    continue
                if isinstance(reply, Done):
                    break
                if isinstance(reply, GroupDone):
                    done += 1
                    seeds = waiting.pop(reply.index).seeds
                    yield self._group(reply, prompts[reply.index], seeds)
                elif isinstance(reply, PromptFailed):
                    del waiting[reply.index]
                    self.failures[prompts[reply.index].id] = f"{reply.error}: {reply.message}"
            self._open_call = None
        finally:
            if call == self._open_call:  # left early, or failed
                self._drop_open_call()
        for name, reason in self.failures.items():
            LOG.warning("prompt %s gave no group: %s", name, reason)
        if prompts and not done:
            first = ": ".join(next(iter(self.failures.items())))
            raise NoResponsesError(f"all {len(prompts)} prompts failed; the first: {first}")

    def _generated(self, call: int, deadline: float, done: int, requested: int) -> Reply:
        if call != self._open_call:
            raise RolloutError(
                "these responses were dropped: another generate or load_weights came before them"
            )
        limit = f"{self.settings.generate_timeout_s:g} s, generate_timeout_s"
        waiting_for = f"responses: {done} of {requested} prompts finished ({limit})"
        return self._reply_to(call, deadline, waiting_for)

    def _group(self, reply: GroupDone, prompt: Prompt, seeds: NDArray[np.int64]) -> RolloutGroup:
        # The worker knows no version of the folder's own weights.
        expected = self.version if self._synced else None
        if self.version is None or reply.version != expected:
            raise RolloutError(
                f"prompt {prompt.id}: sampled with version {reply.version}, expected {expected}"
            )
        return unpack_group(reply, prompt, seeds, self.version, self.settings.decode)

    def _drop_open_call(self) -> None:
        call, self._open_call = self._open_call, None
        if call is not None:
            try:
                self._worker.send(Abort(call))
            except RolloutError as error:  # the cause is already on its way to the caller
                LOG.warning("could not abort generation: %s", error)

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    def _reply_to(self, call: int, deadline: float, waiting_for: str) -> Reply:
        """The next reply to this call; late ones to earlier calls are dropped."""
        while True:
            reply = self._worker.receive(deadline, waiting_for)
            if isinstance(reply, Ready) or reply.call != call:
                continue
            if isinstance(reply, WorkerError):
                raise RolloutError(f"while waiting for {waiting_for}, {reply.error}: {reply.message}")
            return reply


def _loading(version: int) -> str:
    return f"weights of version {version} to load"
