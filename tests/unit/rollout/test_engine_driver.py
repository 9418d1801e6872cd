"""The worker's loop with an engine of our own: order of calls, aborts, failures. No vllm."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.engine_driver import EngineDriver, Outbox
from pnpo_megatron.rollout.messages import (
    Abort,
    Done,
    Generate,
    GroupDone,
    LoadWeights,
    PromptFailed,
    PromptRequest,
    Shutdown,
    Sleep,
    Wake,
    WeightsLoaded,
    WorkerError,
)
from pnpo_megatron.rollout.vllm_worker import drop_prefix_cache, sampling_fields
from pnpo_megatron.types import Sampling

VALUES = Sampling(temperature=0.7, top_p=1.0, max_tokens=9, min_tokens=0, stop_token_ids=(4, 2))


class FakeEngine:
    """Finishes one request a step, the newest first; response tokens are the seed."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.steps = 0
        self.memory: list[str] = []
        self.routes: Callable[[list[int]], Any] = lambda ids: None

    def sleep(self, level: int) -> None:
        self.memory.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.memory += tags

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        if 13 in prompt["prompt_token_ids"]:
            raise ValueError("unlucky token")
        self.requests[request_id] = params

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def step(self) -> list[Any]:
        self.steps += 1
        request_id, params = self.requests.popitem()
        ids = [params["seed"]] * (params["seed"] % 3 + 1)
        response = SimpleNamespace(
            token_ids=ids,
            logprobs=SimpleNamespace(logprobs=[-0.5] * len(ids)),
            finish_reason="stop",
            routed_experts=self.routes(ids),
        )
        return [SimpleNamespace(request_id=request_id, finished=True, outputs=[response])]


def request(index: int, ids: list[int], seeds: list[int]) -> PromptRequest:
    return PromptRequest(index, np.asarray(ids, dtype=np.int32), np.asarray(seeds, dtype=np.int64))


class FakePipe:
    """Holds commands that all came at once; the trainer is gone as soon as the worker has nothing to do."""

    def __init__(self, commands: Sequence[Any]) -> None:
        self.commands = deque(commands)

    def poll(self, timeout: float | None) -> bool:
        return bool(self.commands) or timeout is None

    def recv(self) -> Any:
        if not self.commands:
            raise EOFError
        return self.commands.popleft()


def number(command: LoadWeights) -> int:
    return len(command.entries)


def make_driver(
    engine: FakeEngine, send: Callable[[Any], None] = lambda reply: None, load: Callable[[Any], int] = number
) -> EngineDriver:
    return EngineDriver(engine, sampling_fields, load, send)


def serve(*commands: Any, engine: FakeEngine | None = None, load: Callable[[Any], int] = number) -> list[Any]:
    replies: list[Any] = []
    with pytest.raises(EOFError):
        make_driver(engine or FakeEngine(), replies.append, load).serve(FakePipe(commands))  # type: ignore[arg-type]
    return replies


def test_routes_stay_with_their_response_whatever_order_they_finish_in() -> None:
    engine = FakeEngine()
    engine.routes = lambda ids: np.full((3 + len(ids) - 1, 2, 1), ids[0], np.uint8)
    done = serve(Generate(1, (request(0, [3, 4, 5], [7, 8, 9]),), VALUES), engine=engine)[0]
    assert [(len(one), set(one.flat)) for one in done.routes] == [(4, {7}), (5, {8}), (3, {9})]
    assert serve(Generate(1, (request(0, [3, 4, 5], [7]),), VALUES))[0].routes == ()


def test_members_of_a_group_are_in_sample_order_whatever_order_they_finish_in() -> None:
    group, done = serve(Generate(1, (request(0, [5], [31, 32, 33]),), VALUES))
    assert isinstance(group, GroupDone) and isinstance(done, Done)
    assert group.ids.tolist() == [31, 31, 32, 32, 32, 33] and group.lengths.tolist() == [2, 3, 1]
    assert group.ids.dtype == np.int32 and group.logprobs.dtype == np.float32


def test_a_prompt_that_the_engine_refuses_does_not_lose_the_others() -> None:
    prompts = (request(0, [5], [1]), request(1, [13], [2, 3]), request(2, [6], [4]))
    replies = serve(Generate(7, prompts, VALUES))
    assert replies[0] == PromptFailed(7, 1, "ValueError", "unlucky token")
    assert sorted(reply.index for reply in replies[1:3]) == [0, 2]
    assert isinstance(replies[3], Done) and len(replies) == 4


def test_an_abort_is_noticed_before_the_next_step_and_other_calls_go_on() -> None:
    engine = FakeEngine()
    first = Generate(1, (request(0, [5], list(range(50))),), VALUES)
    second = Generate(2, (request(0, [5], [8]),), VALUES)
    replies = serve(first, second, Abort(1), engine=engine)
    assert [(type(reply), reply.call) for reply in replies] == [(Done, 1), (GroupDone, 2), (Done, 2)]
    assert engine.steps == 1


def test_a_call_without_prompts_is_done_at_once() -> None:
    (done,) = serve(Generate(3, (), VALUES))
    assert isinstance(done, Done)


def test_h32_the_version_is_in_force_only_after_weights_and_cache_reset() -> None:
    generate = Generate(2, (request(0, [5], [1]),), VALUES)
    loaded, group, _ = serve(LoadWeights(1, 5, (), 0), generate)
    assert isinstance(loaded, WeightsLoaded) and (loaded.version, group.version) == (5, 5)

    def refuse(command: Any) -> int:
        drop_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda: False))  # type: ignore[arg-type]
        return 0

    error, group, _ = serve(LoadWeights(1, 6, (), 0), generate, load=refuse)
    assert isinstance(error, WorkerError) and "prefix cache" in error.message
    assert group.version is None


def test_weights_are_not_replaced_while_responses_are_generated() -> None:
    loaded: list[Any] = []
    generate = Generate(1, (request(0, [5], [1]),), VALUES)
    error, *_ = serve(generate, LoadWeights(2, 6, (), 0), load=loaded.append)
    assert isinstance(error, WorkerError) and "still being generated" in error.message
    assert not loaded


def test_h33_sleep_and_wake_leave_no_version_in_force() -> None:
    engine = FakeEngine()
    generate = Generate(4, (request(0, [5], [1]),), VALUES)
    load = LoadWeights(1, 5, (), 0)
    *answers, group, _ = serve(load, Sleep(2), Wake(3, "weights"), generate, engine=engine)
    assert isinstance(answers[0], WeightsLoaded) and answers[1:] == [Done(2), Done(3)]
    assert engine.memory == ["sleep 2", "weights"] and group.version is None
    error, *_ = serve(generate, Sleep(5), engine=engine)
    assert isinstance(error, WorkerError) and "sleep: responses are still" in error.message
    assert engine.memory == ["sleep 2", "weights"]


def test_h34_every_field_that_a_generation_config_could_fill_is_stated() -> None:
    fields = sampling_fields(VALUES, seed=11)
    assert fields["temperature"] == 0.7 and fields["seed"] == 11 and fields["max_tokens"] == 9
    assert (fields["top_p"], fields["top_k"], fields["min_p"]) == (1.0, 0, 0.0)
    penalties = [fields[f"{name}_penalty"] for name in ("repetition", "presence", "frequency")]
    assert penalties == [1.0, 0.0, 0.0]
    assert fields["stop_token_ids"] == [4, 2] and fields["ignore_eos"] is True
    assert fields["logprobs"] == 0 and fields["detokenize"] is False


def test_shutdown_ends_the_loop_in_the_middle_of_generation() -> None:
    engine = FakeEngine()
    pipe = FakePipe([Generate(1, (request(0, [5], list(range(50))),), VALUES), Shutdown()])
    make_driver(engine).serve(pipe)  # type: ignore[arg-type]
    assert engine.steps == 0


def test_a_worker_whose_trainer_is_gone_stops_within_one_step() -> None:
    ours, theirs = Pipe()
    engine = FakeEngine()
    ours.send(Generate(1, (request(0, [5], list(range(50))),), VALUES))
    ours.close()
    with pytest.raises(EOFError):
        make_driver(engine).serve(theirs)  # type: ignore[arg-type]
    assert engine.steps <= 1


def test_a_trainer_that_does_not_read_does_not_hold_up_the_engine() -> None:
    ours, theirs = Pipe()
    outbox = Outbox(theirs)
    ids, logprobs = np.zeros(2**20, np.int32), np.zeros(2**20, np.float32)
    big = GroupDone(1, 0, 1, ids, logprobs, np.array([2**20]), ("stop",))
    started = time.monotonic()
    for _ in range(4):
        outbox.send(big)  # 8 MB each, far beyond what a socket buffers
    assert time.monotonic() - started < 1.0
    assert all(len(ours.recv().ids) == 2**20 for _ in range(4))
    outbox.close()


def test_a_reset_that_works_is_silent() -> None:
    drop_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda: True))  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match="prefix cache"):
        drop_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda: False))  # type: ignore[arg-type]
        return 0
