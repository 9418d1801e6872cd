"""The batch scripts with stub Slurm commands on PATH (TRAPS H38): exit codes survive, nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.s*h")) + sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))

# Two tasks in process groups of their own; the highest code wins. `scancel` ends them.
SRUN = """#!/usr/bin/env bash
echo "$@" >> "$STUB_LOG/srun"
while [[ $1 == -* ]]; do shift; done
export SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE='2'
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task setsid "$@" & pids+=($!)
done
echo "${pids[@]}" > "$STUB_LOG/groups"
code=0
for _ in 0 1; do
    status=0; wait -n -p ended || status=$?
    rank=0; [ "$ended" = "${pids[1]}" ] && rank=1
    (( status > code )) && code=$status
    (( status )) && echo "srun: error: n$rank: task $rank: Exited with exit code $status" >&2
done
exit "$code"
"""
# Rank 0 ends as told; rank 1 would go on for a long time unless rank 0 ends well.
TRAINER = """#!/usr/bin/env bash
env | grep -E '^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|NCCL_.*)=' > "$STUB_LOG/rank_$RANK"
[ "$1" != serve ] || { echo "${CUDA_VISIBLE_DEVICES:-} $*" > "$STUB_LOG/serve_$SLURM_PROCID"; exit; }
echo "$$ $*" >> "$STUB_LOG/trainer"
if [ -n "${STUB_EXIT_FILE:-}" ] && [ "$RANK" = 0 ]; then
    mkdir -p "${STUB_RUN:-run}"; echo "$STUB_EXIT_FILE" > "${STUB_RUN:-run}/exit_code"
fi
if [ "$RANK" = 1 ] && [ "$STUB_CODE" != 0 ]; then exec sleep 60; fi
exit "$STUB_CODE"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$STUB_LOG/scontrol"
case "$1 $2" in
"show hostnames") [ -z "${STUB_NO_HOSTS:-}" ] && printf 'n1\\nn2\\n' ;;
"show node") echo "NodeName=$4 NodeAddr=10.0.0.${4#n} State=IDLE" ;;
"show job") echo "JobId=61234 JobState=${STUB_STATE:-RUNNING} Reason=None" ;;
esac
"""
SCANCEL = """#!/usr/bin/env bash
echo "$@" >> "$STUB_LOG/scancel"
read -ra pids < "$STUB_LOG/groups"
kill -KILL -- "${pids[@]/#/-}" 2> /dev/null
"""
SQUEUE = """#!/usr/bin/env bash
echo '61234.0 train'; echo '61234.batch batch'
"""
STUBS = {"srun": SRUN, "pnpo-megatron": TRAINER, "scontrol": SCONTROL, "scancel": SCANCEL, "squeue": SQUEUE}


@pytest.fixture
def job(tmp_path):
    """Runs a batch script as Slurm would; returns the finished process and the folder of the stubs' notes."""
    commands, notes = tmp_path / "bin", tmp_path / "notes"
    for folder in (commands, notes, tmp_path / "venv" / "bin"):
        folder.mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("")
    (tmp_path / "config.toml").write_text('[run]\nfolder = "run"\n')
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (commands / "python").symlink_to(sys.executable)
    for name, text in STUBS.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)

    def run(*arguments, script="train.sbatch", code=0, **more):
        environment = {
            "PATH": f"{commands}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "STUB_LOG": str(notes),
            "STUB_CODE": str(code),
            "PNPO_VENV": str(tmp_path / "venv"),
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "61234",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "PNPO_GRACE_S": "1",
            **more,
        }
        # Slurm runs a copy of the script from its spool folder, so its own path says nothing.
        copy = tmp_path / "spooled"
        shutil.copy(ROOT / "scripts" / "slurm" / script, copy)
        return subprocess.run(
            ["bash", str(copy), *(arguments or ["config.toml"])],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return run, notes


def trainers_left(notes: Path) -> list[int]:
    """Process ids of stub trainers that still run 5 s later."""
    pids = [int(line.split()[0]) for line in (notes / "trainer").read_text().splitlines()]
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_h38_a_failing_rank_is_the_job_s_exit_code_and_leaves_no_process(job):
    run, notes = job
    start = time.monotonic()
    result = run(code=7, STUB_EXIT_FILE="7")
    assert (result.returncode, trainers_left(notes)) == (7, []), result.stderr
    assert time.monotonic() - start < 10
    assert (notes / "scancel").read_text() == "--signal=KILL 61234.0\n"


def test_h38_a_run_that_ends_well_ends_the_job_well(job):
    run, notes = job
    result = run("config.toml", "--optimizer.lr=1e-4")
    assert result.returncode == 0, result.stderr
    assert "train config.toml --optimizer.lr=1e-4" in (notes / "trainer").read_text()
    assert "requeue" not in (notes / "scontrol").read_text()


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["config.toml"], {"PNPO_VENV": "/nowhere"}),
        (["absent.toml"], {}),
        (["config.toml"], {"STUB_NO_HOSTS": "1"}),
    ],
)
def test_h38_a_failing_setup_step_fails_the_job_before_any_task_starts(job, arguments, environment):
    run, notes = job
    result = run(*arguments, **environment)
    assert result.returncode not in (0, 75)
    assert "error:" in result.stderr
    assert not (notes / "srun").exists()


def test_the_ranks_get_torch_s_names_and_one_rendezvous(job):
    run, notes = job
    run()
    for rank in "01":
        seen = dict(line.split("=") for line in (notes / f"rank_{rank}").read_text().splitlines())
        assert seen == {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "11234",
        }


def test_a_run_that_stopped_with_a_checkpoint_is_requeued(job):
    run, notes = job
    result = run(code=75, STUB_EXIT_FILE="75")
    assert result.returncode == 75
    assert "requeue 61234" in (notes / "scontrol").read_text()


def test_requeueing_ends_at_the_limit(job):
    run, notes = job
    result = run(code=75, STUB_EXIT_FILE="75", SLURM_RESTART_COUNT="3", PNPO_MAX_RESTARTS="3")
    assert result.returncode == 75
    assert "submit again" in result.stderr
    assert "requeue" not in (notes / "scontrol").read_text()


def test_an_exit_code_file_of_an_earlier_start_is_not_believed(job, tmp_path):
    run, notes = job
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit_code").write_text("75\n")
    os.utime(tmp_path / "run" / "exit_code", (1, 1))
    result = run(code=7)
    assert result.returncode != 75
    assert "requeue" not in (notes / "scontrol").read_text()


def test_a_run_folder_given_as_an_override_is_where_the_exit_code_is_read(job, tmp_path):
    run, notes = job
    result = run("config.toml", "--run.folder=other", code=7, STUB_EXIT_FILE="75", STUB_RUN="other")
    assert result.returncode == 75, "rank 0 wrote 75: the run is whole, whatever a rank did while it left"


@pytest.mark.parametrize(
    ("environment", "requeued"),
    [
        ({"STUB_STATE": "CANCELLED"}, False),
        ({"PNPO_REQUEUE_CODES": "75 7"}, True),
    ],
)
def test_a_cancelled_job_stays_away_and_other_codes_come_back_on_request(job, environment, requeued):
    run, notes = job
    code = 7 if requeued else 75
    assert run(code=code, **environment).returncode == code
    assert ("requeue 61234" in (notes / "scontrol").read_text()) == requeued


def test_a_container_gets_the_repository_the_logs_and_the_mounts(job, tmp_path):
    run, notes = job
    run(PNPO_CONTAINER="registry#pnpo:1", PNPO_MOUNTS="/data:/data", PNPO_VENV="/no", SLURM_CPUS_PER_TASK="8")
    words = (notes / "srun").read_text().split()
    logs = tmp_path / "slurm-logs" / "job-61234.0"
    assert {
        "--container-image=registry#pnpo:1",
        f"--container-workdir={tmp_path}",
        "--cpus-per-task=8",
        f"--container-mounts={tmp_path}:{tmp_path},{logs}:{logs},/data:/data",
    } <= set(words)


def test_the_site_s_own_settings_reach_every_rank(job, tmp_path):
    run, notes = job
    (tmp_path / "site.sh").write_text("export NCCL_SOCKET_IFNAME=ib0\n")
    run(PNPO_SITE=str(tmp_path / "site.sh"))
    assert "NCCL_SOCKET_IFNAME=ib0" in (notes / "rank_1").read_text()
    assert run(PNPO_SITE="nowhere.sh").returncode == 2


def test_one_gpu_a_task_is_refused_with_the_reason(job):
    run, notes = job
    result = run(SLURM_GPUS_PER_TASK="1")
    assert result.returncode == 2
    assert "--gpus-per-node" in result.stderr
    assert not (notes / "trainer").exists()


def test_the_last_nodes_serve_and_the_others_train_with_their_addresses(job, tmp_path):
    run, notes = job
    cluster = {"PNPO_ROLLOUT_NODES": "1", "PNPO_SERVERS_PER_NODE": "2", "SLURM_NTASKS_PER_NODE": "2"}
    result = run(
        "config.toml", "--rollout.prompts=64", "--allow-change", CUDA_VISIBLE_DEVICES="0,1,2,3", **cluster
    )
    assert result.returncode == 0, result.stderr
    for number, devices in enumerate(("0,1", "2,3")):
        served = (notes / f"serve_{number}").read_text().split()
        assert served[:4] == [devices, "serve", "config.toml", "--rollout.prompts=64"], (
            "not train's own flags"
        )
        port = str(11235 + number)
        assert served[4:] == ["--host", "10.0.0.2", "--port", port, "--", "--tensor-parallel-size", "2"]
    servers = "http://10.0.0.2:11235,http://10.0.0.2:11236"
    flags = f"--rollout.engine=server --rollout.servers={servers}"
    assert f"--rollout.prompts=64 --allow-change {flags}" in (notes / "trainer").read_text()
    steps = sorted((notes / "srun").read_text().splitlines())
    assert "--job-name=serve --nodes=1 --ntasks=2 --nodelist=n2 --ntasks-per-node=2" in steps[0]
    assert "--nodes=1 --ntasks=2 --nodelist=n1" in steps[1]


def test_a_job_whose_nodes_all_serve_is_refused(job):
    run, notes = job
    result = run(PNPO_ROLLOUT_NODES="2")
    assert (result.returncode, "at least one has to train" in result.stderr) == (2, True)
    assert not (notes / "srun").exists()


def test_the_evaluation_script_passes_its_arguments_and_exit_code(job):
    run, notes = job
    result = run("--model", "base", "--benchmark", "a.jsonl", script="eval.sbatch", code=7)
    assert result.returncode >= 7
    assert "eval --model base --benchmark a.jsonl" in (notes / "trainer").read_text()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_h38_scripts_parse_and_are_strict(path):
    assert subprocess.run(["bash", "-n", str(path)], timeout=30, check=False).returncode == 0
    text = path.read_text(encoding="utf-8")
    if text.startswith("#!"):
        assert "set -euo pipefail" in text


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if path.suffix == ".sbatch"], ids=lambda path: path.name
)
def test_h38_sbatch_lines_come_before_any_command(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first_command for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert any(line.startswith("#SBATCH") for line in lines)


def test_h38_shellcheck_is_clean():
    beside = str(Path(sys.executable).parent)
    shellcheck = shutil.which("shellcheck", path=os.pathsep.join([beside, os.environ["PATH"]]))
    assert shellcheck, "requirements/dev.txt installs it"
    command = [shellcheck, "-x", "-f", "json", *map(str, SCRIPTS), str(ROOT / ".ci" / "run")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(result.stdout) == []
