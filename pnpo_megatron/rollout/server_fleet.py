"""Speaks a worker's messages with vLLM servers: prompts go where the queue is shortest.

One event loop in a thread does all the talking; replies come through a queue. A server that dies costs
nothing but time: the prompts it had not finished go to the others, with the same seeds.
"""

import asyncio
import contextlib
import logging
import resource
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import TypeVar

import httpx

from pnpo_megatron.errors import ConfigError, RolloutError
from pnpo_megatron.rollout.messages import (
    Abort,
    Command,
    Done,
    Generate,
    GroupDone,
    LoadWeights,
    PromptFailed,
    PromptRequest,
    Ready,
    Reply,
    StreamWeights,
    WeightBucket,
    WeightsLoaded,
    WorkerError,
)
from pnpo_megatron.rollout.server_client import Server, ServerLost, ServerRefused
from pnpo_megatron.rollout.server_stream import ServerStream
from pnpo_megatron.rollout.settings import EngineSettings
from pnpo_megatron.rollout.weight_network import WeightOffer
from pnpo_megatron.rollout.worker_process import WorkerDied

T = TypeVar("T")
LOG = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request
CLOSE_S = 2.0
WATCH_S = 1.0
SILENCES = 3
"""Questions in a row without an answer (`HEALTH_S` each), after which a server counts as gone."""
RETRIES = 3
"""Of one prompt with servers that are well; those that die are not counted."""
FOLDERS_OWN = "default"
"""vLLM's name for weights that nobody has sent."""


class ServerFleet:
    """All servers as one worker."""

    def __init__(
        self, urls: Sequence[str], weights_fd: int, needed: EngineSettings, *, timeout_s: float
    ) -> None:
        """Start to look for the servers; Ready comes when all of them answer.

        Args:
            urls: `http://HOST:PORT` of each.
            weights_fd: the sender's buffer.
            needed: what every server must have; it is asked for a quarter more than it generates at once.
            timeout_s: of each request of a weight sync.
        """
        _allow_many_connections()
        self._urls, self._weights_fd = urls, weights_fd
        self._needed, self._timeout_s = needed, timeout_s
        self._queue_length = needed.max_num_seqs + needed.max_num_seqs // 4
        self._run = secrets.token_hex(4)  # a server that another run has sent weights to is noticed
        self._weights: tuple[str, int | None] = FOLDERS_OWN, None
        self._servers: list[Server] = []
        self._replies: SimpleQueue[Reply | RolloutError | ConfigError] = SimpleQueue()
        self._calls: dict[int, Future[None]] = {}
        self._wanted: set[int] = set()
        """Calls that nobody has dropped."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._talk, name="rollout-servers", daemon=True)
        self._thread.start()
        self._begin(0, self._meet())

    def send(self, command: Command) -> None:
        """Begin what is asked; the reply comes by `receive`."""
        match command:
            case Generate():
                self._begin(command.call, self._generate(command))
            case LoadWeights():
                self._begin(command.call, self._load(command))
            case StreamWeights():
                self._begin(command.call, self._open_stream(command))
            case WeightBucket():
                self._begin(command.call, self._pass_on(command))
            case Abort():
                self._wanted.discard(command.call)
                if call := self._calls.pop(command.call, None):
                    call.cancel()
                with contextlib.suppress(Empty):  # its error, if it had one, is nobody's any more
                    while True:
                        self._replies.get_nowait()

    def receive(self, deadline: float, waiting_for: str) -> Reply:
        """The next reply, by time.monotonic() = `deadline`.

        Raises:
            RolloutError: the deadline passed, or no server is left.
            ConfigError: a server was started with other settings.
        """
        try:
            reply = self._replies.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            states = "; ".join(f"{server.url} {server.state}" for server in self._servers)
            raise RolloutError(
                f"the rollout servers passed their deadline: waited for {waiting_for}; {states}"
            ) from None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self, timeout_s: float) -> None:
        """Stop asking. The servers go on: whoever started them ends them."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._thread.join(timeout_s + CLOSE_S)
        self._replies.put(RolloutError("the rollout servers were asked for no more: the run has ended"))

    def _talk(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _begin(self, call: int, work: Coroutine[None, None, Reply]) -> None:
        self._wanted.add(call)  # before it can end
        self._calls = {old: future for old, future in self._calls.items() if not future.done()}
        self._calls[call] = asyncio.run_coroutine_threadsafe(self._answer(call, work), self._loop)

    async def _answer(self, call: int, work: Coroutine[None, None, Reply]) -> None:
        try:
            self._replies.put(await work)
        except (RolloutError, ConfigError) as error:
            if call in self._wanted:
                self._replies.put(error)
        except Exception as error:  # the boundary of the thread: the sampler raises it as its own
            LOG.exception("call %d to the rollout servers", call)
            self._replies.put(WorkerError(call, type(error).__name__, str(error), fatal=False))

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()
        self._loop.call_soon(self._loop.stop)

    async def _meet(self) -> Ready:
        """Wait for every server; how long is the caller's to say."""
        started = time.monotonic()
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )
        self._servers = [Server(url, self._client) for url in self._urls]
        versions = await asyncio.gather(*(self._meet_one(server) for server in self._servers))
        self._watches = [asyncio.create_task(self._watch(server)) for server in self._servers]
        return Ready(time.monotonic() - started, versions[0])

    async def _meet_one(self, server: Server) -> str:
        while True:
            try:
                await server.health()
                version = await server.check_settings(self._needed)
                server.trouble = ""
                return version
            except (ServerLost, ServerRefused) as error:
                server.trouble = f"does not answer ({error})"
            await asyncio.sleep(WATCH_S)

    async def _watch(self, server: Server) -> None:
        silences = 0
        while True:
            await asyncio.sleep(WATCH_S)
            if server.gone.done():
                continue
            try:
                await server.health()
                silences = 0
            except (ServerLost, ServerRefused) as error:
                silences += 1
                if getattr(error, "certain", True) or silences == SILENCES:
                    self._give_up(server, str(error))

    def _give_up(self, server: Server, reason: str) -> None:
        if not server.gone.done():
            server.gone.set_result(reason)
            LOG.warning(
                "rollout server %s is gone (%s); the others take over the %d responses it owes",
                server.url,
                reason,
                server.owes,
            )

    async def _is_gone(self, server: Server, error: ServerLost) -> bool:
        """Whether that error was the end of the server."""
        if error.certain:
            self._give_up(server, str(error))
        if not server.gone.done():
            try:
                await server.health()
            except (ServerLost, ServerRefused) as worse:
                self._give_up(server, f"{error}; then {worse}")
        return server.gone.done()

    def _live(self) -> list[Server]:
        live = [server for server in self._servers if not server.gone.done()]
        if not live:
            reasons = "; ".join(f"{server.url}: {server.gone.result()}" for server in self._servers)
            raise WorkerDied(f"every rollout server is gone: {reasons}")
        return live

    async def _generate(self, command: Generate) -> Done:
        tries = Counter[int]()
        waiting = deque(command.prompts)
        running: dict[asyncio.Task[GroupDone], tuple[Server, PromptRequest]] = {}
        for server in self._servers:
            server.owes = 0
        try:
            while waiting or running:
                while waiting and (free := self._with_room(waiting[0])):
                    prompt = waiting.popleft()
                    free.owes += len(prompt.seeds)
                    work = free.group(command.call, prompt, command.sampling, self._weights[0])
                    running[asyncio.create_task(work)] = free, prompt
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    server, prompt = running.pop(task)
                    server.owes -= len(prompt.seeds)
                    reply = await self._outcome(task, server, command.call, prompt, tries)
                    if reply is None:
                        waiting.appendleft(prompt)
                    else:
                        self._replies.put(reply)
        finally:
            for task in running:
                task.cancel()
        return Done(command.call)

    def _with_room(self, prompt: PromptRequest) -> Server | None:
        """The server that owes least, unless it has enough to do."""
        server = min(self._live(), key=lambda server: server.owes)
        room = not server.owes or server.owes + len(prompt.seeds) <= self._queue_length
        return server if room else None

    async def _outcome(
        self,
        task: asyncio.Task[GroupDone],
        server: Server,
        call: int,
        prompt: PromptRequest,
        tries: Counter[int],
    ) -> GroupDone | PromptFailed | None:
        """None: to be asked for again."""
        try:
            return replace(task.result(), version=self._weights[1])
        except ServerRefused as error:
            return PromptFailed(call, prompt.index, "ServerRefused", f"{server.url}: {error}")
        except ServerLost as error:
            if not await self._is_gone(server, error):
                tries[prompt.index] += 1
                if tries[prompt.index] > RETRIES:
                    return PromptFailed(call, prompt.index, "ServerLost", f"{server.url}: {error}")
            return None

    async def _load(self, command: LoadWeights) -> WeightsLoaded:
        """Send every server the weights; one that was gone and is back gets them too, and is used again."""
        self._weights = name, _ = f"{self._run}/{command.version}", command.version
        offer = WeightOffer(self._weights_fd, command.nbytes, self._timeout_s)
        entries = [asdict(entry) for entry in command.entries]

        async def load(server: Server) -> None:
            update = {"source": offer.source(server.host), "nbytes": command.nbytes, "entries": entries}
            await server.open_update(self._timeout_s)
            await server.update(update, self._timeout_s)
            await server.close_update(name, self._timeout_s)

        try:
            await self._with_each(load)
        finally:
            offer.close()
        return WeightsLoaded(command.call, command.version, len(command.entries))

    async def _open_stream(self, command: StreamWeights) -> Done:
        """Bring the workers of the servers that are there together; one that is lost later ends the sync."""
        self._weights = name, _ = f"{self._run}/{command.version}", command.version

        async def open_one(server: Server) -> int:
            await server.open_update(self._timeout_s)
            return await server.workers(self._timeout_s)

        workers = await self._with_each(open_one)
        self._stream = ServerStream(workers, name, self._timeout_s)
        await self._stream.join()
        return Done(command.call)

    async def _pass_on(self, command: WeightBucket) -> Done | WeightsLoaded:
        version = self._weights[1]
        if command.entries:
            await self._stream.send(command.entries, command.content)
            return Done(command.call)
        await self._stream.close()
        assert version is not None
        return WeightsLoaded(command.call, version, self._stream.tensors)

    async def _with_each(self, work: Callable[[Server], Awaitable[T]]) -> dict[Server, T]:
        """What came of the servers that are there, or are again, and did not go meanwhile."""
        work_each = (self._sync(server, work) for server in self._servers)
        ends = await asyncio.gather(*work_each, return_exceptions=True)
        for error in ends:
            if isinstance(error, BaseException):
                raise error
        pairs = zip(self._servers, ends, strict=True)
        live = self._live()
        return {server: end for server, end in pairs if server in live}  # type: ignore[misc]

    async def _sync(self, server: Server, work: Callable[[Server], Awaitable[T]]) -> T | None:
        try:
            if server.gone.done():
                await server.health()
                await server.check_settings(self._needed)
            end = await work(server)
        except (ServerLost, ServerRefused) as error:
            if isinstance(error, ServerRefused) or not await self._is_gone(server, error):
                raise RolloutError(f"weight sync: {server.url}: {error}") from error
            return None
        if server.gone.done():
            LOG.warning("rollout server %s is back", server.url)
            server.gone = asyncio.get_running_loop().create_future()
        return end


def _allow_many_connections() -> None:
    """One a response that is being generated; many systems start a process with 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
