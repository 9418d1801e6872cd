"""The worker's loop: commands in, engine steps, replies out. Knows an engine by its methods only.

The loop looks at the pipe before every engine step, so an abort or the end of the trainer is noticed
within one step.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.messages import (
    Abort,
    Command,
    Done,
    Generate,
    GroupDone,
    LoadWeights,
    PromptFailed,
    PromptRequest,
    Reply,
    Response,
    Shutdown,
    Sleep,
    StreamWeights,
    Wake,
    WeightsLoaded,
    WorkerError,
)
from pnpo_megatron.types import Sampling

FLUSH_S = 5.0


@dataclass
class _Group:
    """Responses to one prompt, None until finished."""

    version: int | None
    outputs: list[Response | None]


class EngineDriver:
    """Commands in, engine steps, replies out."""

    def __init__(
        self,
        engine: Any,
        make_params: Callable[[Sampling, int], Any],
        replace_weights: Callable[[LoadWeights | StreamWeights], int],
        send: Callable[[Reply], None],
    ) -> None:
        """`engine`: vLLM's LLMEngine. `make_params` turns values and a seed into its own; `replace_weights`
        counts tensors."""
        self._engine, self._make_params, self._replace_weights, self._send = (
            engine, make_params, replace_weights, send,
        )  # fmt: skip
        self._calls: dict[int, dict[int, _Group]] = {}
        """The prompts of every call that have not been answered."""
        self._version: int | None = None

    def serve(self, conn: Connection) -> None:
        """Until Shutdown; EOFError when the trainer is gone, so that an idle wait needs no deadline."""
        while True:
            if conn.poll(0.0 if self._engine.has_unfinished_requests() else None):
                command: Command = conn.recv()
                if isinstance(command, Shutdown):
                    return
                self.handle(command)
            else:
                self._collect(self._engine.step())

    def handle(self, command: Command) -> None:
        """Start, stop or do what is asked."""
        match command:
            case Generate():
                self._generate(command)
            case Abort():
                self._abort(command.call)
            case LoadWeights() | StreamWeights():
                self._answer(command.call, lambda: self._load_weights(command))
            case Sleep():
                self._answer(command.call, lambda: self._sleep(command.call))
            case Wake():
                self._answer(command.call, lambda: self._wake(command))

    def _generate(self, command: Generate) -> None:
        groups = self._calls[command.call] = {}
        for prompt in command.prompts:
            groups[prompt.index] = _Group(self._version, [None] * len(prompt.seeds))
            try:
                self._add(command, prompt)
            except Exception as error:  # whatever the engine has against this prompt, the others go on
                self._fail(command.call, prompt.index, type(error).__name__, str(error))
        self._finish_if_empty(command.call)

    def _add(self, command: Generate, prompt: PromptRequest) -> None:
        ids = prompt.ids.tolist()
        for sample, seed in enumerate(prompt.seeds.tolist()):
            params = self._make_params(command.sampling, seed)
            request_id = _request_id(command.call, prompt.index, sample)
            self._engine.add_request(request_id, {"type": "token", "prompt_token_ids": ids}, params)

    def _collect(self, outputs: Iterable[Any]) -> None:
        for output in outputs:
            number, index, sample = (int(part) for part in output.request_id.split("/"))
            group = self._calls.get(number, {}).get(index)
            if not output.finished or group is None:
                continue
            response = output.outputs[0]
            if response.finish_reason not in ("stop", "length"):
                self._fail(
                    number, index, "RequestError", f"sample {sample} ended with {response.finish_reason!r}"
                )
            else:
                self._store(number, index, group, sample, response)
            self._finish_if_empty(number)

    def _store(self, number: int, index: int, group: _Group, sample: int, response: Any) -> None:
        ids = np.asarray(response.token_ids, dtype=np.int32)
        logprobs = np.asarray(response.logprobs.logprobs, dtype=np.float32)
        group.outputs[sample] = Response(ids, logprobs, response.finish_reason, response.routed_experts)
        done = [output for output in group.outputs if output is not None]
        if len(done) == len(group.outputs):
            del self._calls[number][index]
            self._send(GroupDone.of(number, index, group.version, done))

    def _fail(self, number: int, index: int, error: str, message: str) -> None:
        group = self._calls[number].pop(index)
        self._engine.abort_request(
            [_request_id(number, index, sample) for sample in range(len(group.outputs))]
        )
        self._send(PromptFailed(number, index, error, message))

    def _abort(self, number: int) -> None:
        groups = self._calls.get(number)
        if groups is not None:
            left = [(index, sample) for index, one in groups.items() for sample in range(len(one.outputs))]
            self._engine.abort_request([_request_id(number, index, sample) for index, sample in left])
            groups.clear()
            self._finish_if_empty(number)

    def _finish_if_empty(self, number: int) -> None:
        if self._calls.get(number) == {}:
            del self._calls[number]
            self._send(Done(number))

    def _answer(self, call: int, work: Callable[[], Reply]) -> None:
        try:
            reply = work()
        except EOFError:
            raise  # the trainer is gone
        except Exception as error:  # crosses the pipe as data; the sampler stops the run
            reply = WorkerError(call, type(error).__name__, str(error), fatal=False)
        self._send(reply)

    def _load_weights(self, command: LoadWeights | StreamWeights) -> Reply:
        self._version = None  # a failed sync leaves no version in force
        self._refuse_while_generating("weight sync")
        tensors = self._replace_weights(command)
        self._version = command.version
        return WeightsLoaded(command.call, command.version, tensors)

    def _sleep(self, call: int) -> Reply:
        self._version = None  # the weights are gone: waking does not bring them back (TRAPS H33)
        self._refuse_while_generating("sleep")
        self._engine.sleep(level=2)
        return Done(call)

    def _wake(self, command: Wake) -> Reply:
        self._engine.wake_up(tags=[command.part])
        return Done(command.call)

    def _refuse_while_generating(self, doing: str) -> None:
        if self._engine.has_unfinished_requests():
            raise RolloutError(f"{doing}: responses are still being generated")


def _request_id(call: int, index: int, sample: int) -> str:
    return f"{call}/{index}/{sample}"


class Outbox:
    """Sends replies from a thread, so that a trainer that is busy never holds up the engine."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._queue: SimpleQueue[Reply | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, reply: Reply) -> None:
        """Queue one reply."""
        self._queue.put(reply)

    def close(self) -> None:
        """Wait for what is queued, at most FLUSH_S seconds."""
        self._queue.put(None)
        self._thread.join(FLUSH_S)

    def _run(self) -> None:
        while (reply := self._queue.get()) is not None:
            try:
                self._conn.send(reply)
            except OSError:  # the trainer is gone; the main thread sees the end of the pipe
                return
