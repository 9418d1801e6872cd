"""Every process of a run, frozen in turn (SIGSTOP): the run ends, and says what it waited for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from quick_runs import Launch
from tiny_task import make_task, read_metrics, write_config

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]
FLAGS = (
    "--run.silence_s=10", "--rollout.generate_timeout_s=20", "--rollout.sync_timeout_s=20", "--steps=200",
    "--reward.timeout_s=2", "--eval.benchmarks=[]", "--export.every=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


def child_of(parent: int, words: str) -> int:
    """A process that `parent` has started."""
    for entry in Path("/proc").iterdir():
        try:
            above = (
                int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) if entry.name.isdigit() else 0
            )
            if above == parent and words in (entry / "cmdline").read_text().replace("\0", " "):
                return int(entry.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise AssertionError(f"{parent} has no child {words!r}")


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("rank 0", "rank 0 has given no sign of life"),
        ("rank 1", "rank 1 has given no sign of life"),
        ("rollout.worker_main", "the rollout worker passed its deadline: waited for"),
    ],
)
def test_the_run_ends_and_names_what_it_waited_for(task, process_server, who, words):
    folder = task / who.replace(" ", "")
    launch = Launch(process_server, write_config(task, folder), *FLAGS, ranks=2)
    deadline = time.monotonic() + 600
    while len(read_metrics(folder)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = [process.pid for process in launch.ranks]
    victim = ranks[int(who[-1])] if who.startswith("rank") else child_of(ranks[0], who)
    os.kill(victim, signal.SIGSTOP)
    frozen = [process for process in launch.ranks if process.pid == victim]
    launch.ranks = [process for process in launch.ranks if process.pid != victim]
    codes = launch.wait(300.0)
    for process in frozen:  # what a launcher does once the others have failed
        process.kill()
        process.join()
    assert set(codes) == {1} and words in launch.output, f"{codes}\n{launch.output}"


def test_a_frozen_grader_is_replaced_and_the_run_goes_on(task, process_server):
    """Its deadline passes, it is killed, and the grade is given again by another."""
    folder = task / "grader"
    launch = Launch(process_server, write_config(task, folder), *FLAGS, "--steps=4", ranks=1)
    deadline = time.monotonic() + 600
    while len(read_metrics(folder)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(child_of(launch.ranks[0].pid, "reward.worker"), signal.SIGSTOP)
    assert launch.wait(300.0) == [0], launch.output
