"""The batch script of the converters: which tool runs, with which options, and whose exit code counts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$STUB_LOG"
exit 7
"""


@pytest.fixture
def job(tmp_path):
    """Runs the script as Slurm would, with stubs for python and srun; the process and the stubs' notes."""
    commands, log = tmp_path / "bin", tmp_path / "log"
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("")
    commands.mkdir()
    for name in ("python", "srun"):
        (commands / name).write_text(STUB)
        (commands / name).chmod(0o755)

    def run(*arguments: str, **more: str) -> tuple[subprocess.CompletedProcess[str], str]:
        environment = os.environ | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "PNPO_VENV": str(tmp_path / "venv"),
            "STUB_LOG": str(log),
        }
        command = ["bash", str(ROOT / "scripts" / "slurm" / "convert.sbatch"), *arguments]
        done = subprocess.run(
            command, env=environment | more, capture_output=True, text=True, timeout=30, check=False
        )
        return done, log.read_text() if log.exists() else ""

    return run


def test_the_named_tool_gets_its_options_and_its_exit_code_is_the_job_s(job):
    done, called = job("megatron_to_hf", "--megatron", "a b", "--out", "c")
    assert (done.returncode, done.stderr) == (7, "")
    assert called == "python tools/checkpoint_convert/megatron_to_hf.py --megatron a b --out c\n"


def test_in_a_container_the_same_command_runs_once(job):
    done, called = job("verify", "--hf", "x", PNPO_CONTAINER="image.sqsh", PNPO_MOUNTS="/models:/models")
    assert done.returncode == 7
    assert called.startswith("srun --ntasks=1 --container-image=image.sqsh")
    assert ",/models:/models python tools/checkpoint_convert/verify.py --hf x\n" in called


@pytest.mark.parametrize("arguments", [(), ("train", "x.toml"), ("../x",)])
def test_an_unknown_tool_ends_with_2_and_the_usage(job, arguments):
    done, called = job(*arguments)
    assert (done.returncode, called) == (2, "")
    assert "usage: sbatch scripts/slurm/convert.sbatch hf_to_megatron|megatron_to_hf|verify" in done.stderr
