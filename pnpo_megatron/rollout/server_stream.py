"""One weight sync of rollout servers over NCCL: requests that say what comes, beside the broadcast of it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from itertools import accumulate

from torch import Tensor

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.messages import TensorEntry
from pnpo_megatron.rollout.server_client import Server
from pnpo_megatron.rollout.weight_stream import Broadcaster


class ServerStream:
    """A communicator that lasts one sync: a server that was started again meanwhile is no special case."""

    def __init__(self, workers: Mapping[Server, int], weights: str, timeout_s: float) -> None:
        """`workers`: how many each server has; `weights`: what the servers shall call what they get."""
        self._ranks = dict(zip(workers, accumulate(workers.values(), initial=1), strict=False))
        self._broadcaster = Broadcaster(sum(workers.values()))
        self._weights, self.tensors = weights, 0
        self._timeout_s = 0.9 * timeout_s  # before the caller's own deadline: here it is known who is late

    async def join(self) -> None:
        """Until every worker is there."""
        invitations = {server: self._broadcaster.invitation(rank) for server, rank in self._ranks.items()}
        await self._together(
            self._broadcaster.join, lambda server: server.join(invitations[server], self._timeout_s)
        )

    async def send(self, entries: Sequence[TensorEntry], packed: Tensor) -> None:
        """Until every worker has taken these tensors."""
        update = {"entries": [asdict(entry) for entry in entries]}
        await self._together(
            partial(self._broadcaster.broadcast, packed),
            lambda server: server.update(update, self._timeout_s),
        )
        self.tensors += len(entries)

    async def close(self) -> None:
        """Until every server has the whole model and generates again."""

        async def close(server: Server) -> None:
            await server.update({"entries": []}, self._timeout_s)
            await server.close_update(self._weights, self._timeout_s)

        await self._together(self._broadcaster.abort, close)

    async def _together(
        self, ours: Callable[[], None], theirs: Callable[[Server], Coroutine[None, None, None]]
    ) -> None:
        """Our part, in a thread, and theirs. NCCL waits for everybody, so whoever fails ends it for all."""
        tasks = {server.url: asyncio.ensure_future(theirs(server)) for server in self._ranks}
        tasks["the trainer"] = asyncio.ensure_future(_in_daemon(ours))
        await asyncio.wait(tasks.values(), timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = [
            f"{who}: {task.exception()}" for who, task in tasks.items() if task.done() and task.exception()
        ]
        late = [who for who, task in tasks.items() if not task.done()]
        if failed or late:
            for task in tasks.values():
                task.cancel()
            _in_daemon(self._broadcaster.abort)
            reason = "; ".join(failed) or f"no end after {self._timeout_s:g} s"
            raise RolloutError(
                f"weight sync over NCCL: {reason}; waited for {', '.join(late) or 'nobody'}; start the "
                "servers again, they may still wait"
            )


def _in_daemon(work: Callable[[], None]) -> asyncio.Future[None]:
    """Done when `work` is, in a thread that nobody waits for at the end of the process."""
    end: Future[None] = Future()
    end.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
            end.set_result(None)
        except Exception as error:  # the boundary of the thread
            end.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(end)
