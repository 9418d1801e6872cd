"""Real training under a real Slurm of two nodes on this machine: the numbers of torchrun, stopped or not."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from local_slurm import ROOT, Job, LocalSlurm, missing

sys.path.append(str(ROOT / "tests" / "e2e"))
from tiny_task import (  # noqa: E402
    STEPS,
    environment,
    finish,
    make_task,
    read_metrics,
    start_training,
    without_times,
    write_config,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "it runs"),
]
RUN_S, PATIENT = 480.0, "--run.timeout_s=480"
# A weight whose second rank ends without a word in its fifth update.
EXIT_7 = """
import os
from pnpo_megatron.algorithm.weights import prefix_ratio

calls = 0

def weight(stats):
    global calls
    calls += 1
    if calls > 4 and os.environ["RANK"] == "1":
        os._exit(7)
    return prefix_ratio(stats)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with LocalSlurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def by_torchrun(task):
    """What two ranks under torchrun write."""
    code, output = finish(start_training(write_config(task, task / "torchrun"), PATIENT, ranks=2), RUN_S)
    assert code == 0, output
    return without_times(read_metrics(task / "torchrun"))


@pytest.fixture
def submit(slurm, task, tmp_path):
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")

    def run(folder: Path, *arguments: str, **more: str) -> Job:
        config = str(write_config(task, folder))
        settings = environment() | {"PNPO_VENV": sys.prefix} | more
        settings = {name: settings[name] for name in settings if not name.startswith("PYTEST")}
        return slurm.submit("train.sbatch", config, PATIENT, *arguments, folder=tmp_path, **settings)

    return run


def test_two_nodes_train_to_the_numbers_of_two_ranks_under_torchrun(submit, task, by_torchrun):
    job = submit(task / "slurm")
    job.wait(lambda: job.state() not in ("PENDING", "RUNNING", "COMPLETING"), "end of the job", RUN_S)
    assert job.state() == "COMPLETED", job.log()
    assert without_times(read_metrics(task / "slurm")) == by_torchrun
    assert not job.processes()


def test_a_run_stopped_by_term_and_requeued_ends_with_the_same_numbers(submit, slurm, task, by_torchrun):
    folder = task / "requeued"
    job = submit(folder)
    started = lambda: any(row["kind"] == "update" for row in read_metrics(folder))  # noqa: E731
    job.wait(started, "first update", RUN_S)
    slurm.command("scancel", "--signal=TERM", job.number)
    job.wait(lambda: job.field("Restarts") == "1" and job.state() == "PENDING", "the requeued job", RUN_S)
    assert max(row["step"] for row in read_metrics(folder)) < STEPS, "stopped too late to show anything"
    job.start_soon()
    job.wait(lambda: job.state() not in ("PENDING", "RUNNING", "COMPLETING"), "end of the job", RUN_S)
    print(job.log())  # shown by -s and by a failure: the log of a requeued job in docs/operations.md is this
    assert job.state() == "COMPLETED", job.log()
    assert without_times(read_metrics(folder)) == by_torchrun
    assert "resuming after step" in job.log()


def test_a_training_rank_that_exits_7_ends_the_job_with_7_within_30_s(submit, task, tmp_path):
    (tmp_path / "fatal.py").write_text(EXIT_7)
    job = submit(
        task / "fatal",
        "--objective.weight=fatal:weight",
        PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}",
    )
    job.wait(lambda: "Exited with exit code 7" in job.log(), "rank 1's end", RUN_S)
    end = time.monotonic()
    job.wait(lambda: job.state() == "FAILED" and not job.processes(), "the end of everything", 30)
    assert job.field("ExitCode") == "7:0", job.log()
    assert time.monotonic() - end < 30
