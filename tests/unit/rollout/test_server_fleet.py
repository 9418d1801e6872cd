"""Prompts over several servers, and what becomes of them when servers fail. No engine: `fake_server`."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_server import SETTINGS, FakeServer, tokens_of

from pnpo_megatron.errors import ConfigError, RolloutError
from pnpo_megatron.rollout import server_client, server_fleet
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
    WeightsLoaded,
)
from pnpo_megatron.rollout.server_fleet import ServerFleet
from pnpo_megatron.rollout.settings import EngineSettings
from pnpo_megatron.rollout.weight_transfer import WeightSender
from pnpo_megatron.rollout.worker_process import WorkerDied
from pnpo_megatron.types import Sampling

# anyio says so when a connection is cancelled while it is being made
pytestmark = pytest.mark.filterwarnings("ignore:coroutine 'connect_tcp")
NEEDED = EngineSettings("folder", "float32", max_model_len=64, kv_cache_memory_bytes=0)
VALUES = Sampling(temperature=1.0, top_p=1.0, max_tokens=8, min_tokens=0, stop_token_ids=(3,))
WEIGHTS = {"a": torch.arange(5.0), "b": torch.tensor([[2.5, -1.0]])}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_fleet, "WATCH_S", 0.05)
    monkeypatch.setattr(server_fleet, "SILENCES", 2)
    monkeypatch.setattr(server_client, "HEALTH_S", 5.0)


@pytest.fixture
def pair() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer() as one, FakeServer("127.0.0.2") as other:
        yield one, other


class Fleet:
    """A fleet with a sender, and a deadline on everything."""

    def __init__(self, *servers: FakeServer, max_num_seqs: int = 4) -> None:
        self.sender = WeightSender({name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()})
        urls = [server.url for server in servers]
        engine = replace(NEEDED, max_num_seqs=max_num_seqs)
        self.fleet = ServerFleet(urls, self.sender.fd, engine, timeout_s=5.0)

    def __enter__(self) -> Fleet:
        assert isinstance(self.next(), Ready)
        return self

    def __exit__(self, *error: object) -> None:
        self.fleet.close(5.0)
        self.sender.close()
        assert not self.fleet._thread.is_alive()

    def next(self, seconds: float = 5.0) -> Reply:
        return self.fleet.receive(time.monotonic() + seconds, "the test")

    def load(self, version: int, call: int = 90) -> Reply:
        entries, nbytes = self.sender.write(WEIGHTS.items())
        self.fleet.send(LoadWeights(call, version, entries, nbytes))
        return self.next()

    def ask(self, prompts: int, call: int = 1, group_size: int = 2) -> None:
        self.fleet.send(Generate(call, tuple(request(i, group_size) for i in range(prompts)), VALUES))

    def rest(self, call: int = 1) -> dict[int, GroupDone | PromptFailed]:
        """By prompt, until the call is done; a second answer to a prompt fails the test."""
        found: dict[int, GroupDone | PromptFailed] = {}
        while not isinstance(reply := self.next(), Done):
            assert isinstance(reply, GroupDone | PromptFailed) and reply.index not in found
            assert reply.call == call
            found[reply.index] = reply
        return found


def request(index: int, group_size: int) -> PromptRequest:
    seeds = np.arange(group_size, dtype=np.int64) + 10 * index
    return PromptRequest(index, np.asarray([index + 1, 4], dtype=np.int32), seeds)


def assert_group(reply: object, index: int, weights: str, version: int | None, group_size: int = 2) -> None:
    assert isinstance(reply, GroupDone), reply
    asked = request(index, group_size)
    expected = [tokens_of(asked.ids.tolist(), seed, weights) for seed in asked.seeds.tolist()]
    assert reply.ids.tolist() == sum(expected, [])
    assert reply.lengths.tolist() == [len(ids) for ids in expected]
    np.testing.assert_allclose(reply.logprobs, -0.1 * reply.ids, rtol=1e-6)
    assert (reply.version, set(reply.finish_reasons)) == (version, {"stop"})


def test_prompts_go_where_the_queue_is_shortest_and_no_queue_grows_long(
    pair: tuple[FakeServer, FakeServer],
) -> None:
    slow, fast = pair
    slow.gate.clear()
    with Fleet(slow, fast) as fleet:
        fleet.ask(20)
        fast.wait(lambda: len(fast.asked) >= 36)
        slow.gate.set()
        found = fleet.rest()
    for index in range(20):
        assert_group(found[index], index, "default", None)
    assert len(slow.asked) == 4  # a quarter more than max_num_seqs = 4 has room for two groups of two
    assert max(slow.most_open, fast.most_open) <= 5


def test_h34_every_sampling_value_is_sent_and_every_sample_has_its_seed() -> None:
    with FakeServer() as server, Fleet(server) as fleet:
        fleet.ask(3)
        fleet.rest()
    assert sorted(body["sampling_params"]["seed"] for body in server.asked) == [0, 1, 10, 11, 20, 21]
    sent = server.asked[0]["sampling_params"]
    neutral = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "n": 1, "logprobs": 0}
    assert sent.items() >= (neutral | {"max_tokens": 8, "stop_token_ids": [3], "temperature": 1.0}).items()


def test_the_prompts_of_a_killed_server_go_to_the_other_with_the_same_seeds(
    pair: tuple[FakeServer, FakeServer], caplog: pytest.LogCaptureFixture
) -> None:
    doomed, other = pair
    doomed.gate.clear()
    with Fleet(doomed, other) as fleet:
        fleet.ask(12)
        doomed.wait(lambda: doomed.open == 4)
        doomed.kill()
        found = fleet.rest()
    for index in range(12):
        assert_group(found[index], index, "default", None)
    assert f"rollout server {doomed.url} is gone" in caplog.text
    assert other.url not in caplog.text


def test_without_any_server_left_the_error_comes_at_once_and_names_them(
    pair: tuple[FakeServer, FakeServer],
) -> None:
    for server in pair:
        server.gate.clear()
    with Fleet(*pair) as fleet:
        fleet.ask(12)
        pair[0].wait(lambda: pair[0].open + pair[1].open == 8)
        for server in pair:
            server.kill()
        with pytest.raises(WorkerDied, match=rf"every rollout server is gone: {pair[0].url}.*{pair[1].url}"):
            fleet.rest()
        fleet.ask(1, call=2)
        with pytest.raises(WorkerDied, match="every rollout server is gone"):
            fleet.rest(2)


def test_a_server_that_falls_silent_is_given_up(
    pair: tuple[FakeServer, FakeServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frozen, other = pair
    frozen.gate.clear()
    with Fleet(frozen, other) as fleet:
        monkeypatch.setattr(server_client, "HEALTH_S", 0.5)
        frozen.well.clear()
        fleet.ask(6)
        found = fleet.rest()
    assert len(found) == 6 and all(isinstance(reply, GroupDone) for reply in found.values())
    assert f"{frozen.url} is gone (" in caplog.text and other.url not in caplog.text


def test_a_request_lost_by_a_server_that_is_well_is_asked_again() -> None:
    with FakeServer() as server, Fleet(server) as fleet:
        server.plan.append(lambda body: None)
        server.plan.append(lambda body: server.right(body, finish_reason="abort"))
        server.plan.append(lambda body: (500, {"error": {"message": "busy"}}))
        fleet.ask(2)
        found = fleet.rest()
        assert_group(found[0], 0, "default", None)
        assert_group(found[1], 1, "default", None)
        server.plan.extend([lambda body: None] * 8)
        fleet.ask(1, call=2)
        failed = fleet.rest(2)[0]
    assert isinstance(failed, PromptFailed) and server.url in failed.message


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<html>", "not JSON"),
        ((200, {"choices": []}), "no usable response"),
        ((200, {"choices": [{"token_ids": [1]}]}), "no usable response: KeyError"),
        ((400, {"error": {"message": "too long for me"}}), "HTTP 400: too long for me"),
        ((404, {"detail": "Not Found"}), "HTTP 404"),
    ],
)
def test_a_bad_reply_costs_its_prompt_alone(answer: Any, message: str) -> None:
    with FakeServer() as server, Fleet(server) as fleet:
        server.plan.append(lambda body: answer)
        fleet.ask(4)
        found = fleet.rest()
    (failed,) = [reply for reply in found.values() if isinstance(reply, PromptFailed)]
    assert message in failed.message and server.url in failed.message
    assert len(found) == 4


def test_h33_a_server_started_again_with_other_weights_is_not_believed(
    pair: tuple[FakeServer, FakeServer], caplog: pytest.LogCaptureFixture
) -> None:
    replaced, other = pair
    with Fleet(*pair) as fleet:
        fleet.load(7)
        weights, replaced.weights = replaced.weights, "default"
        fleet.ask(6)
        found = fleet.rest()
        for index in range(6):
            assert_group(found[index], index, weights, 7)
        assert f"{replaced.url} is gone (it holds weights ['default'], not '{weights}'" in caplog.text
        assert isinstance(fleet.load(8), WeightsLoaded)
        assert f"rollout server {replaced.url} is back" in caplog.text
        asked = len(replaced.asked)
        fleet.ask(6, call=2)
        found = fleet.rest(2)
        assert_group(found[5], 5, other.weights, 8)
        assert len(replaced.asked) > asked


def test_a_logprob_that_is_no_number_stays_visible() -> None:
    with FakeServer() as server, Fleet(server) as fleet:
        content = {"content": [{"token_id": 1, "logprob": -9999.0}]}
        server.plan.append(lambda body: server.right(body, token_ids=[1], logprobs=content))
        fleet.ask(1, group_size=1)
        reply = fleet.rest()[0]
    assert isinstance(reply, GroupDone) and np.isnan(reply.logprobs).all()


def test_routes_come_as_the_server_writes_them() -> None:
    """vLLM's own encoding of an array that tells token, layer and place apart."""
    from vllm.utils.serial_utils import numpy2base64

    routes = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    with FakeServer() as server, Fleet(server) as fleet:
        server.plan.append(lambda body: server.right(body, routed_experts=numpy2base64(routes)))
        fleet.ask(1, group_size=1)
        reply = fleet.rest()[0]
    assert isinstance(reply, GroupDone) and [one.tolist() for one in reply.routes] == [routes.tolist()]


def test_a_passed_deadline_names_what_was_waited_for_and_who_owes_it() -> None:
    with FakeServer() as server, Fleet(server) as fleet:
        server.gate.clear()
        fleet.ask(2)
        server.wait(lambda: server.open == 4)
        with pytest.raises(RolloutError, match=rf"waited for the test; {server.url} owes 4 responses"):
            fleet.next(0.05)
        server.gate.set()
        fleet.rest()


def test_closing_wakes_a_thread_that_waits_for_a_reply() -> None:
    with FakeServer() as server, Fleet(server) as fleet, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fleet.next, 60.0)
        fleet.fleet.close(5.0)
        with pytest.raises(RolloutError, match="the run has ended"):
            waiting.result(timeout=10)


def test_a_server_that_never_comes_up_is_named_at_the_deadline() -> None:
    with socket.socket() as bound, FakeServer() as there:
        bound.bind(("127.0.0.1", 0))  # not listening
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        fleet = ServerFleet([there.url, url], 0, NEEDED, timeout_s=1.0)
        with pytest.raises(RolloutError, match=rf"for servers; .*{url} does not answer \(ConnectError"):
            fleet.receive(time.monotonic() + 0.5, "servers")
        fleet.close(5.0)


def test_dropped_calls_leave_the_servers_and_the_next_one_is_whole() -> None:
    with FakeServer() as server, Fleet(server) as fleet:
        server.gate.clear()
        fleet.ask(20)
        server.wait(lambda: server.open == 4)
        fleet.fleet.send(Abort(1))
        server.wait(lambda: server.dropped == 4)
        server.gate.set()
        fleet.ask(3, call=2)
        assert len(fleet.rest(2)) == 3
    assert len(server.asked) == 4 + 6


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs"),
        ("weight_transfer_config", "backend", "nccl"),
        ("model_config", "max_model_len", 63),
        ("model_config", "dtype", "torch.bfloat16"),
        ("aux_output_config", "enable_return_routed_experts", False),
    ],
)
def test_a_server_started_otherwise_is_refused_with_what_it_lacks(section: str, key: str, value: Any) -> None:
    with FakeServer() as server:
        server.settings = SETTINGS | {section: SETTINGS[section] | {key: value}}
        fleet = ServerFleet([server.url], 0, replace(NEEDED, routes=True), timeout_s=1.0)
        with pytest.raises(ConfigError, match=rf"{server.url} was not started by.*{key} = '?{value}"):
            fleet.receive(time.monotonic() + 5, "servers")
        fleet.close(5.0)


ORDER = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update",
         "/reset_prefix_cache", "/resume"]  # fmt: skip


def test_h32_weights_reach_every_server_between_pause_and_resume(pair: tuple[FakeServer, FakeServer]) -> None:
    with Fleet(*pair) as fleet:
        reply = fleet.load(3)
        fleet.ask(4)
        found = fleet.rest()
    assert isinstance(reply, WeightsLoaded) and (reply.version, reply.tensors) == (3, 2)
    for server in pair:  # one has the address of this host, and so its memory; the other gets a stream
        assert server.routes == ORDER
        assert server.received == [{name: tensor.tolist() for name, tensor in WEIGHTS.items()}]
        assert server.weights.endswith("/3")
    assert pair[0].weights == pair[1].weights
    assert_group(found[3], 3, pair[0].weights, 3)


def test_a_sync_that_a_dead_trainer_left_open_is_closed_first() -> None:
    with FakeServer() as server, Fleet(server) as fleet:
        server.refuse["/start_weight_update"] = deque([(500, "already active")])
        assert isinstance(fleet.load(3), WeightsLoaded)
    assert server.routes == [*ORDER[:2], "/finish_weight_update", *ORDER[1:]]


@pytest.mark.parametrize(
    ("route", "status", "message"),
    [
        ("/update_weights", 500, "checksum differs"),
        ("/update_weights", 400, "no such field"),
        ("/reset_prefix_cache", 500, "blocks are held"),
    ],
)
def test_a_sync_that_a_server_refuses_stops_the_run_and_leaves_it_paused(
    pair: tuple[FakeServer, FakeServer], route: str, status: int, message: str
) -> None:
    bad, _ = pair
    bad.refuse[route] = deque([(status, message)])
    with Fleet(*pair) as fleet, pytest.raises(RolloutError, match=rf"weight sync: {bad.url}.*{message}"):
        fleet.load(3)
    assert "/resume" not in bad.routes


def test_a_server_that_keeps_its_old_name_after_a_sync_stops_the_run() -> None:
    with FakeServer() as server, Fleet(server) as fleet:
        server.refuse["/finish_weight_update"] = deque([(200, "done, it says")])
        with pytest.raises(RolloutError, match=r"holds weights 'default' after a sync to '\w+/3'"):
            fleet.load(3)


def test_the_error_of_a_call_that_was_dropped_does_not_reach_the_next_one() -> None:
    with FakeServer() as server, Fleet(server) as fleet:
        server.gate.clear()
        fleet.ask(2)
        server.wait(lambda: server.open == 4)
        fleet.fleet._servers[0].gone.get_loop().call_soon_threadsafe(
            fleet.fleet._give_up, fleet.fleet._servers[0], "told so"
        )
        server.wait(lambda: all(call.done() for call in fleet.fleet._calls.values()))
        fleet.fleet.send(Abort(1))
        server.gate.set()
        assert isinstance(fleet.load(3), WeightsLoaded)  # it is back
        fleet.ask(2, call=2)
        assert len(fleet.rest(2)) == 2


def test_a_server_that_dies_in_a_sync_is_left_out(pair: tuple[FakeServer, FakeServer]) -> None:
    with Fleet(*pair) as fleet:
        pair[0].kill()
        assert isinstance(fleet.load(3), WeightsLoaded)
        pair[1].kill()
        with pytest.raises(WorkerDied, match="every rollout server is gone"):
            fleet.load(4, call=91)
