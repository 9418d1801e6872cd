"""Ranks that watch each other: when one dies, fails or falls silent, the others end soon and say which, and
where it was.

A collective says neither, and waits for as long as the longest honest wait may take. Signs of life go over
sockets of their own, from threads of their own: every rank to rank 0 and back.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from pnpo_megatron.parallel.rank_zero import from_rank_zero

BEAT_S, GRACE_S = 0.5, 3.0


class Watch:
    """Started on every rank, as a context; `place` says where this rank is."""

    def __init__(
        self,
        silence_s: float,
        group: dist.ProcessGroup | None,
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect the ranks. Collective over `group`.

        Args:
            silence_s: a rank not heard of for so long counts as dead; 0 does not watch.
            group: all ranks over gloo; None is a single one, which nobody watches.
            before_exit: called when this process is ended because of another rank.
        """
        self.place = "starting"
        self._silence_s, self._before_exit = silence_s, before_exit
        self._links: dict[int, _Link] = {}
        self._server: socket.socket | None = None
        self._closing, self._explained = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        if group is None or not silence_s:
            return
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        if self._rank == 0:
            self._server = socket.create_server((_listening_address(), 0))
            self._server.setblocking(False)
        server = self._server
        self._port, self._token = from_rank_zero(
            lambda: (server.getsockname()[1] if server else 0, secrets.token_hex(16)),
            group,
            "starting the watch",
        )
        if self._rank:
            self._connect()
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take leave, or tell the others what went wrong here.

        An error here may be the echo of a rank that has died: its end is given a moment to be seen first.
        """
        if self._thread.ident is None:
            return
        echo = bool(kind and self._explained.wait(3 * BEAT_S))
        self._closing.set()
        self._thread.join(GRACE_S)
        if echo:
            return
        failed = f"rank {self._rank} failed ({self.place}): {kind.__name__}: {error}" if kind else ""
        for link in self._links.values():
            link.send({"end": failed} if failed else {"bye": True})
            link.close()
        if self._server:
            self._server.close()

    def _connect(self) -> None:
        """To rank 0, which has said at which port it listens."""
        address = (os.environ.get("MASTER_ADDR", "127.0.0.1"), self._port)
        self._links[0] = _Link(socket.create_connection(address, timeout=self._silence_s))
        self._links[0].send({"token": self._token, "rank": self._rank})

    def _run(self) -> None:
        begin = time.monotonic()
        waiting: list[_Link] = []
        while not self._closing.wait(BEAT_S):
            if self._server:
                waiting = self._accept(waiting)
                late = set(range(1, self._size)) - self._links.keys()
                if late and time.monotonic() - begin > self._silence_s:
                    return self._end(f"rank {min(late)} has not been heard of since the start")
            for rank, link in list(self._links.items()):
                link.send({"place": self.place})
                if wrong := self._wrong(rank, link):
                    return self._end(wrong)

    def _accept(self, waiting: list[_Link]) -> list[_Link]:
        """Peers that say who they are; the others are listened to a little longer."""
        try:
            while self._server:
                waiting.append(_Link(self._server.accept()[0]))
        except BlockingIOError:
            pass
        strangers = []
        for link in waiting:
            hello = next(iter(link.receive()), None)
            if hello is not None and hello.get("token") == self._token:
                self._links[int(hello["rank"])] = link
            elif hello is None and not link.closed:
                strangers.append(link)
        return strangers

    def _wrong(self, rank: int, link: _Link) -> str:
        """What is the matter with a peer, or nothing."""
        for message in link.receive():
            if message.get("end"):
                return str(message["end"])
            if message.get("bye"):
                del self._links[rank]
                return ""
            link.place = str(message.get("place", link.place))
        if link.closed:
            return f"rank {rank} died ({link.place})"
        silent = time.monotonic() - link.heard
        if silent > self._silence_s:
            return f"rank {rank} has given no sign of life for {silent:.0f} s ({link.place})"
        return ""

    def _end(self, why: str) -> None:
        """Tell everybody, leave this process a moment to fail by itself, and end it."""
        self._explained.set()
        for link in self._links.values():
            link.send({"end": why})
        print(f"error: rank {self._rank} ends ({self.place}): {why}", file=sys.stderr, flush=True)
        if self._closing.wait(GRACE_S):
            return
        self._before_exit()
        os._exit(1)


def _listening_address() -> str:
    """MASTER_ADDR, which is rank 0's own.

    Many a machine calls itself 127.0.1.1, where other nodes cannot reach it: then, and only then, everywhere.
    """
    address = socket.gethostbyname(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    several_nodes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < int(os.environ.get("WORLD_SIZE", "1"))
    return "" if several_nodes and address.startswith("127.") else address


class _Link:
    """One JSON object a line, both ways, never waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._buffer = connection, b""
        self.closed, self.heard, self.place = False, time.monotonic(), "starting"

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.send(json.dumps(message).encode() + b"\n")
        except BlockingIOError:  # it does not read: its silence will tell
            pass
        except OSError:
            self.closed = True

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived."""
        try:
            while data := self._socket.recv(65536):
                self._buffer += data
                self.heard = time.monotonic()
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()
