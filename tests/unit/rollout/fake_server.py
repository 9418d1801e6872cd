"""A rollout server without an engine: answers the routes that the fleet uses, well or badly, as told."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch

from pnpo_megatron.rollout.messages import TensorEntry
from pnpo_megatron.rollout.weight_network import receive
from pnpo_megatron.rollout.weight_transfer import verified

Answer = tuple[int, dict[str, Any]] | str | None
"""Status and JSON; text that is not JSON; None drops the connection."""
SETTINGS: dict[str, Any] = {
    "model_config": {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "max_model_len": 64,
        "dtype": "torch.float32",
    },
    "weight_transfer_config": {"backend": "pnpo"},
    "aux_output_config": {"enable_return_routed_experts": True},
}


def tokens_of(ids: list[int], seed: int, weights: str) -> list[int]:
    """What a fake engine samples: a function of prompt, seed and the step of the weights."""
    version = int(weights.partition("/")[2] or 0)
    return [(sum(ids) * 7 + seed * 3 + version * 5 + i) % 50 for i in range(1 + seed % 3)]


class Air:
    """Stands for a `Broadcaster` and the workers' end of it: as NCCL, nobody goes on before all are there."""

    def __init__(self, workers: int) -> None:
        self.size, self.ranks, self.left = workers + 1, {0}, False
        self.packed = torch.empty(0)
        self.sent: list[torch.Tensor] = []
        self._here, self._round, self._change = 0, 0, threading.Condition()
        Air.last = self

    last: Air

    def invitation(self, first_rank: int) -> dict[str, Any]:
        return {"rank_offset": first_rank, "world_size": self.size}

    def join(self) -> None:
        self.meet(1)

    def broadcast(self, packed: torch.Tensor) -> None:
        self.packed = packed
        self.sent.append(packed)
        self.meet(1)
        self.meet(1)

    def abort(self) -> None:
        with self._change:
            self.left = True
            self._change.notify_all()

    def meet(self, count: int) -> None:
        with self._change:
            now, self._here = self._round, self._here + count
            if self._here == self.size:
                self._here, self._round = 0, self._round + 1
                self._change.notify_all()
            elif not self._change.wait_for(lambda: self._round > now or self.left, 10) or self._round == now:
                raise RuntimeError("somebody did not come")


class FakeServer:
    """``with FakeServer() as server``: listens on a free port of `host`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host, self.port, self.workers = host, 0, 1
        self.weights = "default"
        self.settings = SETTINGS
        self.asked: list[dict[str, Any]] = []
        self.routes: list[str] = []
        self.received: list[dict[str, list[float]]] = []
        self.open, self.most_open, self.dropped = 0, 0, 0
        self.gate = threading.Event()
        self.gate.set()
        self.well = threading.Event()
        self.well.set()
        self.plan: deque[Callable[[dict[str, Any]], Answer]] = deque()
        """What the next requests for responses meet; the right answer when it is empty."""
        self.refuse: dict[str, deque[tuple[int, str]]] = {}
        """Route to the errors that its next calls meet."""
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> FakeServer:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.handle(self, b"")

            def do_POST(self) -> None:
                fake.handle(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def get_request(self) -> tuple[socket.socket, Any]:
                accepted = super().get_request()
                fake._sockets.add(accepted[0])
                return accepted

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # the other side has gone

        self._listener = Listener((self.host, self.port), Handler)
        self.port = self._listener.server_address[1]
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        """As SIGKILL leaves it: no listener, every connection cut."""
        self._listener.shutdown()
        self._listener.server_close()
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._sockets.clear()
        self.gate.set()
        self.well.set()

    def wait(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the fake server waited in vain"
            time.sleep(0.002)

    def handle(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        answer = self._answer(urlsplit(request.path).path, json.loads(body or b"{}"), request.connection)
        if answer is None:
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        status, content = (200, answer) if isinstance(answer, str) else (answer[0], json.dumps(answer[1]))
        request.send_response(status)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content.encode())

    def _answer(self, route: str, body: dict[str, Any], connection: socket.socket) -> Answer:
        if route == "/health":
            self.well.wait(10)
            return 200, {}
        if route == "/inference/v1/generate":
            return self._generate(body, connection)
        if route == "/server_info":
            return 200, {"vllm_config": self.settings}
        if route == "/version":
            return 200, {"version": "0.0"}
        if route == "/get_world_size":
            return 200, {"world_size": self.workers}
        if route == "/weight_info":
            return 200, {"weight_version": self.weights}
        self.routes.append(route)
        if self.refuse.get(route):
            status, message = self.refuse[route].popleft()
            return status, {"error": {"message": message}}
        if route == "/init_weight_transfer_engine":
            first = body["init_info"]["rank_offset"]
            Air.last.ranks |= set(range(first, first + self.workers))
            Air.last.meet(self.workers)
        if route == "/update_weights":
            self._update(body["update_info"])
        if route == "/finish_weight_update" and body:
            self.weights = body["weight_version"]
        return 200, {}

    def _generate(self, body: dict[str, Any], connection: socket.socket) -> Answer:
        with self._lock:
            self.asked.append(body)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            planned = self.plan.popleft() if self.plan else None
        try:
            while not self.gate.wait(0.005):
                if not self._connected(connection):
                    self.dropped += 1
                    return None
            return planned(body) if planned else self.right(body)
        finally:
            with self._lock:
                self.open -= 1

    @staticmethod
    def _connected(connection: socket.socket) -> bool:
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def right(self, body: dict[str, Any], **changes: Any) -> Answer:
        """The reply of a server that is well, but for `changes` of its choice."""
        ids = tokens_of(body["token_ids"], body["sampling_params"]["seed"], self.weights)
        choice = {
            "token_ids": ids,
            "finish_reason": "stop",
            "logprobs": {"content": [{"token_id": token, "logprob": -0.1 * token} for token in ids]},
            "weight_versions": [{"version": self.weights, "start": 0, "end": len(ids)}],
        }
        return 200, {"choices": [choice | changes]}

    def _update(self, info: dict[str, Any]) -> None:
        entries = [TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in info["entries"]]
        if "source" not in info:
            self._receive_broadcast(entries)
            return
        with receive(info["source"], info["nbytes"]) as receiver:
            self.received.append({name: tensor.tolist() for name, tensor in receiver.tensors(entries)})

    def _receive_broadcast(self, entries: list[TensorEntry]) -> None:
        """As vLLM cuts packed bytes: one tensor after the other, no gaps."""
        if not entries:
            return
        Air.last.meet(self.workers)
        dtypes = [getattr(torch, entry.dtype) for entry in entries]
        sizes = [math.prod(one.shape) * dtype.itemsize for one, dtype in zip(entries, dtypes, strict=True)]
        parts = Air.last.packed.split(sizes)
        self.received.append({
            entry.name: verified(entry, part.clone().view(dtype).view(entry.shape)).tolist()
            for entry, part, dtype in zip(entries, parts, dtypes, strict=True)
        })  # fmt: skip
        Air.last.meet(self.workers)
