"""The batch scripts under a real Slurm of two nodes (TRAPS H38), with a program of a few lines."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from local_slurm import ROOT, Job, LocalSlurm, missing

SCRIPTS = sorted(path.name for path in (ROOT / "scripts" / "slurm").glob("*.sbatch"))
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "it runs")

# "fail": rank 1 ends with 7 while rank 0 hangs and does not listen. "save": stopped by a signal, as training.
PROGRAM = """#!{python} -S
import os, pathlib, signal, sys, time
if sys.argv[1] == "serve":
    print("serving", *sys.argv[2:], os.environ["SLURMD_NODENAME"], flush=True)
    pathlib.Path("served").touch()
    time.sleep(120)
rank, restart = int(os.environ["RANK"]), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
def stop(number, frame):
    if rank == 0:
        pathlib.Path("run").mkdir(exist_ok=True)
        pathlib.Path("run/exit_code").write_text("75\\n")
    print("rank", rank, "saved after", signal.Signals(number).name, flush=True)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN if os.environ["PLAN"] == "fail" else stop)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SLURMD_NODENAME")
print("start", restart, *(os.environ[name] for name in names), flush=True)
pathlib.Path(f"started_{{restart}}_{{rank}}").touch()
if os.environ["PLAN"] == "served":
    while not pathlib.Path("served").exists():
        time.sleep(0.05)
    print(*sys.argv[1:], flush=True)
    sys.exit(0)
if os.environ["PLAN"] == "save" and restart:
    sys.exit(0)
if os.environ["PLAN"] == "fail" and rank == 1:
    while not pathlib.Path("started_0_0").exists():
        time.sleep(0.05)
    print("the reason", flush=True)
    sys.exit(7)
time.sleep(120)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with LocalSlurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def submit(slurm, tmp_path):
    """`submit(plan, *options)`: train.sbatch on two nodes; waits until both ranks have started."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pnpo-megatron").write_text(PROGRAM.format(python=sys.executable))
    (tmp_path / "bin" / "pnpo-megatron").chmod(0o755)
    (tmp_path / "bin" / "activate").write_text(f'PATH="{tmp_path}/bin:{Path(sys.executable).parent}:$PATH"\n')
    (tmp_path / "config.toml").write_text('[run]\nfolder = "run"\n')
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "bin").symlink_to(tmp_path / "bin")

    def run(plan: str, *options: str, ranks: int = 2, **environment: str) -> Job:
        job = slurm.submit(
            "train.sbatch", "config.toml", folder=tmp_path, options=options,
            PLAN=plan, PNPO_VENV=str(tmp_path / "venv"), PNPO_GRACE_S="3", **environment,
        )  # fmt: skip
        job.wait(lambda: len(list(tmp_path.glob("started_0_*"))) == ranks, "all ranks", 30)
        return job

    return run


def test_h38_a_rank_that_exits_7_fails_the_job_with_7_and_nothing_is_left_within_30_s(submit, tmp_path):
    job = submit("fail")
    start = time.monotonic()
    job.wait(lambda: job.state() == "FAILED", "the job's end", 30)
    assert job.field("ExitCode") == "7:0"
    left = max(1.0, 30 - (time.monotonic() - start))
    job.wait(lambda: not job.processes(), "the end of its processes", left)
    log = job.log()
    assert "the first to end: n2: task 1: Exited with exit code 7" in log
    assert log.rstrip().endswith("the reason"), "the failing rank's own last words end the log"


@pytest.mark.parametrize("how", ["TERM", pytest.param("USR1", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_back_into_the_queue_and_resumes(submit, slurm, tmp_path, how):
    """TERM by hand; USR1 as Slurm sends it before the time limit (it looks every 30 s)."""
    job = submit("save", *(["--time=2", "--signal=USR1@90"] if how == "USR1" else []))
    if how == "TERM":
        slurm.command("scancel", "--signal=TERM", job.number)
    job.wait(lambda: job.state() == "PENDING" and job.field("Restarts") == "1", "the requeued job", 100)
    job.start_soon()
    job.wait(lambda: job.state() == "COMPLETED", "the second start", 30)
    for rank in "01":
        starts = (tmp_path / "slurm-logs" / f"pnpo-train-{job.number}.{start}" for start in "01")
        first, second = (folder / f"rank_00{rank}.log" for folder in starts)
        where = ["start", "0", rank, "0", "2", "1", "127.0.0.1", f"n{int(rank) + 1}"]
        assert first.read_text().splitlines() == [" ".join(where), f"rank {rank} saved after SIG{how}"]
        assert second.read_text().split()[:2] == ["start", "1"]
    assert "goes back into the queue" in job.log()


def test_a_job_that_a_person_cancels_does_not_come_back(submit, slurm):
    job = submit("save")
    slurm.command("scancel", job.number)
    job.wait(lambda: job.state() == "CANCELLED" and not job.processes(), "the job's end", 30)
    assert (job.field("Restarts"), "saved after SIGTERM" in job.log()) == ("0", True)
    assert "queue" not in job.log(), "nobody even asked Slurm to take it back"
    assert job.number not in slurm.command("squeue", "-h", "-o", "%i").split()


def test_a_rollout_node_serves_while_the_other_trains_and_ends_with_the_job(submit, tmp_path):
    job = submit("served", ranks=1, PNPO_ROLLOUT_NODES="1")
    job.wait(lambda: job.state() == "COMPLETED" and not job.processes(), "the job's end", 40)
    (logs,) = tmp_path.glob("slurm-logs/*")
    port = 10000 + int(job.number) % 20000 + 1
    address = f"127.0.0.1 --port {port}"
    assert (logs / "server_000.log").read_text() == f"serving config.toml --host {address} -- n2\n"
    started, trained = (logs / "rank_000.log").read_text().splitlines()
    assert started == "start 0 0 0 1 1 127.0.0.1 n1"
    assert trained.endswith(f"config.toml --rollout.engine=server --rollout.servers=http://127.0.0.1:{port}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_slurm_accepts_the_header_for_the_documented_cluster(slurm, script):
    slurm.command("sbatch", "--test-only", str(ROOT / "scripts" / "slurm" / script), "config.toml")
