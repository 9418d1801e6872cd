"""A rank that dies, fails, or is frozen: the others end soon, and say which it was and where (TRAPS H38)."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pnpo_megatron.parallel.watch import _listening_address

SILENCE_S = 3.0


def rank_main(rank: int, port: int, how: str, victim: int, log: Path) -> None:
    """Two ranks in endless collectives; the victim leaves them in one way or another."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    from pnpo_megatron.parallel.watch import Watch

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=600))
    with Watch(SILENCE_S, group, lambda: Path(f"{log}.{rank}").touch()) as watch:
        for number in range(1_000_000):
            watch.place = f"update {number}"
            if number == 20 and rank == victim:
                watch.place = "the middle of it"
                time.sleep(1.5)  # a beat carries the place
                leave(how)
            if how == "bye" and number == 20:
                return
            dist.barrier(group)


def leave(how: str) -> None:
    if how == "raises":
        raise ValueError("the disk is on fire")
    os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)


@pytest.mark.parametrize(
    ("how", "victim", "words"),
    [
        ("dies", 1, "rank 1 died (the middle of it)"),
        ("dies", 0, "rank 0 died (the middle of it)"),
        ("freezes", 2, "rank 2 has given no sign of life for"),
        ("freezes", 0, "rank 0 has given no sign of life for"),
        ("raises", 1, "rank 1 failed (the middle of it): ValueError: the disk is on fire"),
    ],
)
def test_h38_the_others_end_soon_and_name_the_rank_and_its_place(
    process_server: Any, tmp_path: Path, how: str, victim: int, words: str
) -> None:
    log = tmp_path / "log"
    log.touch()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        process_server.Process(target=rank_main, args=(rank, store.port, how, victim, log))
        for rank in range(3)
    ]
    for process in ranks:
        process.start()
    others = [process for rank, process in enumerate(ranks) if rank != victim]
    for process in others:
        process.join(90.0)
    codes = [process.exitcode for process in others]
    for process in ranks:
        process.kill()
        process.join()
    assert codes == [1, 1], f"{codes}\n{log.read_text()}"
    assert words in log.read_text(), log.read_text()
    assert how == "raises" or "the middle of it" in log.read_text()


def test_ranks_that_finish_take_leave_in_peace(process_server: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        process_server.Process(target=rank_main, args=(rank, store.port, "bye", -1, log)) for rank in range(3)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90.0)
    assert [process.exitcode for process in ranks] == [0, 0, 0] and "error" not in log.read_text()


@pytest.mark.parametrize(
    ("master", "local_ranks", "address"),
    [
        ("127.0.0.1", "4", "127.0.0.1"),
        ("10.1.2.3", "4", "10.1.2.3"),
        ("10.1.2.3", "2", "10.1.2.3"),
        ("127.0.1.1", "2", ""),  # what Debian calls a node by itself: the other node could not come in
    ],
)
def test_only_other_nodes_that_could_not_come_in_make_it_listen_everywhere(
    monkeypatch: pytest.MonkeyPatch, master: str, local_ranks: str, address: str
) -> None:
    for name, value in (("MASTER_ADDR", master), ("LOCAL_WORLD_SIZE", local_ranks), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert _listening_address() == address
