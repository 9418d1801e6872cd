"""Runs a function on several processes that form a gloo group; behind the `spawn` fixture."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy
import torch
import torch.distributed as dist


class RankFailed(AssertionError):
    """A rank raised, died, or ran past the time limit."""


def seed_all(seed: int = 1234) -> None:
    """One seed for every generator a test may draw from."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def run_on_ranks(
    context: Any, function: Callable[..., Any], ranks: int, args: tuple[Any, ...], timeout_s: float
) -> list[Any]:
    """Call ``function(*args)`` on every rank; the results, in rank order. Nothing outlives the call."""
    # The parent holds the store, so no port is guessed and none can be taken in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_main, args=(theirs, rank, ranks, store.port, timeout_s, function, args)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _collect(pipes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever the rank has started
            process.kill()
            process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        # After a failure the peers' own errors get a moment to arrive, no more.
        left = 0.5 if failures else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), timeout=left)
        if not ready:
            failures = failures or [f"ranks {sorted(waiting.values())} gave no result before the time limit"]
            break
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            error, results[rank] = _receive(pipe)  # type: ignore[arg-type]
            if error:
                failures.append(f"rank {rank} of {len(pipes)}: {error}")
    if failures:
        raise RankFailed("\n".join(failures))
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection) -> tuple[str | None, Any]:
    try:
        error, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "the process died without a word", None
    return error, value


def rank_main(
    pipe: Connection,
    rank: int,
    ranks: int,
    port: int,
    timeout_s: float,
    function: Callable[..., Any],
    args: Any,
) -> None:
    """What each process runs."""
    os.setpgrp()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # A collective outside autograd gives wrong gradients in silence (TRAPS H17): never let that warning pass.
    warnings.filterwarnings("error", message=".*autograd kernel.*")
    try:
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        seed_all()
        message = pickle.dumps((None, function(*args)))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while a peer still reads from it
    except BaseException:
        message = pickle.dumps((traceback.format_exc(), None))
    pipe.send_bytes(message)
    pipe.close()
