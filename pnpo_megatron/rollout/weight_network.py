"""How a rollout server gets at the trainer's weights: its memory on the same host, a TCP stream from another.

The manifest travels with the request (`vllm_transfer`), so both ways end in the same checksums.
"""

import hmac
import mmap
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.weight_transfer import WeightReceiver

BACKEND = "pnpo"
"""Name of our engine among vLLM's weight transfer engines."""
SERVER_PID = "PNPO_SERVER_PID"
"""Environment variable: tells a server's workers whose end is theirs."""
TOKEN_BYTES = 32
SAME_HOST = ("localhost", "127.0.0.1", "::1")
CONNECT_S = 30.0


class WeightOffer:
    """Gives the sender's buffer to servers while one sync lasts."""

    def __init__(self, fd: int, nbytes: int, timeout_s: float) -> None:
        """`timeout_s`: longest silence of a server that is being sent to."""
        self._fd, self._nbytes, self._timeout_s = fd, nbytes, timeout_s
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._listeners: dict[str, socketserver.ThreadingTCPServer] = {}

    def source(self, host: str) -> dict[str, Any]:
        """Where the server on `host` finds the bytes.

        A port is opened only for servers of other hosts, on the one address that leads to them, and what
        connects there must know the token.
        """
        if host in SAME_HOST:
            return {"path": f"/proc/{os.getpid()}/fd/{self._fd}"}
        address = _address_towards(host)
        if address not in self._listeners:
            self._listeners[address] = self._listen(address)
        port = self._listeners[address].server_address[1]
        return {"address": address, "port": port, "token": self._token.hex()}

    def close(self) -> None:
        """Close every port."""
        for listener in self._listeners.values():
            listener.shutdown()
            listener.server_close()

    def _listen(self, address: str) -> socketserver.ThreadingTCPServer:
        offer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                offer._serve(self.request)

        class Listener(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            daemon_threads = True

        listener = Listener((address, 0), Handler)
        threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return listener

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(self._timeout_s)
        told = connection.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        if hmac.compare_digest(told, self._token):
            with os.fdopen(os.dup(self._fd), "rb") as memory:
                connection.sendfile(memory, 0, self._nbytes)


def _address_towards(host: str) -> str:
    """This machine's address on the way to `host`; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RolloutError(f"weight sync: no way to {host}: {error}") from error


@contextmanager
def receive(source: dict[str, Any], nbytes: int) -> Iterator[WeightReceiver]:
    """The bytes that a `WeightOffer` names, as long as the block lasts.

    Raises:
        RolloutError: they cannot be reached, or end early.
    """
    try:
        fd = os.open(source["path"], os.O_RDWR) if "path" in source else _download(source, nbytes)
    except OSError as error:
        raise RolloutError(
            f"weight sync: the trainer's weights cannot be reached ({error}); a server in another container "
            "or of another user needs an address other than 127.0.0.1 in rollout.servers"
        ) from error
    try:
        yield WeightReceiver(fd)
    finally:
        os.close(fd)


def _download(source: dict[str, Any], nbytes: int) -> int:
    """The whole stream in memory without a name; its descriptor."""
    fd = os.memfd_create("pnpo_weights")
    try:
        os.ftruncate(fd, max(nbytes, 1))
        with (
            closing(mmap.mmap(fd, max(nbytes, 1))) as memory,
            memoryview(memory) as view,
            socket.create_connection((source["address"], source["port"]), CONNECT_S) as connection,
        ):
            connection.sendall(bytes.fromhex(source["token"]))
            done = 0
            while done < nbytes:
                got = connection.recv_into(view[done:nbytes])
                if not got:
                    raise ConnectionError(f"the stream ended after {done} of {nbytes} bytes")
                done += got
    except OSError:
        os.close(fd)
        raise
    return fd
