"""Whole training runs in forked processes that have imported everything already: a second a run, and a place
at which to kill one."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_task import STEPS, read_metrics, without_times

PROMPTS, GROUP, RESPONSE = 4, 4, 12
REPLAYED = ("--eval.benchmarks=[]", "--rollout.max_mismatch=100", "--run.silence_s=15")


@dataclass(frozen=True)
class Kill:
    """SIGKILL on entry to the nth call of a function, or a moment later."""

    place: str
    """``module:Class.method``."""
    nth: int = 1
    delay_s: float = 0.0
    rank: int = 0
    how: int = signal.SIGKILL


def write_rollouts(folder: Path, steps: int = STEPS) -> Path:
    """Stored batches for replay: random tokens, every group with something to teach."""
    from pnpo_megatron.rollout.store import RolloutStore
    from pnpo_megatron.types import RolloutBatch, SequenceRecord, TrainSequence

    store = RolloutStore(folder)
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        sequences, records = [], []
        for row in range(PROMPTS * GROUP):
            length = int(torch.randint(4, RESPONSE + 1, (), generator=generator))
            ids = torch.randint(3, 15, (4 + length,), generator=generator)
            mask = torch.arange(4 + length) >= 4
            logprobs = torch.where(mask, -2.5 - torch.rand(4 + length, generator=generator), 0.0)
            sequences.append(TrainSequence(ids, mask, logprobs, float(row % GROUP) - 1.5))
            group = row // GROUP
            records.append(
                SequenceRecord(f"p{group}", group, row % GROUP, row, step - 1, "stop", row % GROUP, False, "")
            )
        store.write(RolloutBatch(step, tuple(sequences), tuple(records), tuple(r.group for r in records)))
    store.close()
    return folder


class Launch:
    """One start of a run: its ranks, and their common output."""

    def __init__(
        self,
        context: Any,
        config: Path,
        *flags: str,
        ranks: int = 1,
        kill: Kill | None = None,
        patch: str = "",
    ) -> None:
        """`patch`: ``module:function`` that every rank calls first."""
        self.log = config.with_suffix(".log")
        self.log.write_text("")
        self.spread_s = 0.0
        """From the end of the first rank to that of the last."""
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = []
        for rank in range(ranks):
            arguments = (rank, ranks, self._store.port, self.log, ["train", str(config), *flags], kill, patch)
            self.ranks.append(context.Process(target=_rank, args=arguments))
            self.ranks[-1].start()

    def wait(self, timeout_s: float = 900.0) -> list[int]:
        """Exit codes; negative is the signal. Nothing outlives the call."""
        deadline, first = time.monotonic() + timeout_s, 0.0
        while time.monotonic() < deadline and any(process.is_alive() for process in self.ranks):
            time.sleep(0.05)
            if not first and not all(process.is_alive() for process in self.ranks):
                first = time.monotonic()
        late = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
        self.spread_s = time.monotonic() - first
        for process in self.ranks:
            process.kill()
            process.join()
        assert not late, f"ranks {late} still ran after {timeout_s} s:\n{self.output}"
        return [process.exitcode for process in self.ranks]

    @property
    def output(self) -> str:
        return self.log.read_text()


def run(context: Any, config: Path, *flags: str, **options: Any) -> tuple[list[int], str]:
    """Start, wait; exit codes and output."""
    launch = Launch(context, config, *flags, **options)
    return launch.wait(), launch.output


def _rank(
    rank: int, ranks: int, port: int, log: Path, words: list[str], kill: Kill | None, patch: str
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        )  # fmt: skip
    from pnpo_megatron.cli import main

    if patch:
        module, _, name = patch.partition(":")
        getattr(importlib.import_module(module), name)()
    if kill is not None and kill.rank == rank:
        arm(kill)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def arm(kill: Kill) -> None:
    """Wrap the function; this process is killed when its turn comes."""
    module, _, path = kill.place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    inner, calls = getattr(owner, name), []

    def die() -> None:
        time.sleep(kill.delay_s)
        os.kill(os.getpid(), kill.how)

    @wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == kill.nth:
            threading.Thread(target=die).start() if kill.delay_s else die()
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def same_run(ours: Path, theirs: Path) -> None:
    """Rows, times aside, and every exported tensor, bitwise."""
    assert without_times(read_metrics(ours)) == without_times(read_metrics(theirs))
    for folder in sorted((theirs / "hf").iterdir()):
        mine = load_file(ours / "hf" / folder.name / "model.safetensors")
        for name, tensor in load_file(folder / "model.safetensors").items():
            assert torch.equal(mine[name], tensor), f"{folder.name}: {name}"
