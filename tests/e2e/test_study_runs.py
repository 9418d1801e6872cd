"""A study of a weight of one's own against the paper's, killed and resumed, on the tiny task."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_task import ROOT, environment, finish, make_task, read_metrics, write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLE = ROOT / "examples" / "add_a_weight"
STUDY = """
config = "{config}"
folder = "{folder}"
updates = 8
evaluate_every = 4
seeds = [1]
[common]
objective.gate_low = 0.5
objective.gate_high = 0.5
[settings.paper]
objective.weight = "prefix"
[settings.own]
objective.weight = "shrunk_prefix:shrunk_prefix"
"""


def start(task: Path, name: str) -> tuple[subprocess.Popen[str], Path]:
    folder, study = task / name, task / f"{name}.study.toml"
    study.write_text(STUDY.format(config=write_config(task, folder), folder=folder))
    here = environment()
    here["PYTHONPATH"] += os.pathsep + str(EXAMPLE)
    command = [sys.executable, "-m", "pnpo_megatron", "compare", str(study)]
    process = subprocess.Popen(
        command, env=here, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return process, folder


def kill_in_the_second_run(process: subprocess.Popen[str], folder: Path, timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if any(row["kind"] == "update" for row in read_metrics(folder / "own" / "seed_1")):
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return
        time.sleep(0.05)
    raise AssertionError(f"no update of the second run within {timeout_s} s\n{finish(process, 5.0)[1]}")


def results(folder: Path) -> list[dict]:
    runs = json.loads((folder / "results.json").read_text())["runs"]
    return [{key: value for key, value in run.items() if key != "seconds"} for run in runs]


def test_a_weight_of_ones_own_trains_and_a_killed_study_resumes_to_the_same_table(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    task = make_task(tmp_path_factory.mktemp("task"))
    process, whole = start(task, "whole")
    code, output = finish(process, 900.0)
    assert code == 0, output
    assert "| own | 1 of 1 |" in output and (whole / "report.html").is_file()
    paper, own = ([row for row in read_metrics(whole / name / "seed_1") if row["kind"] == "update"]
                  for name in ("paper", "own"))  # fmt: skip
    assert len(paper) == len(own) == 8 and not any(row["update/skipped"] for row in own)
    assert paper[1]["ladder/prefix"] == own[1]["ladder/prefix"] > 0.0, "one update in, both policies are one"
    for quantile in ("weight/q01", "weight/q99"):
        ratio = math.log(own[1][quantile]) / math.log(paper[1][quantile])
        assert 1 / 9 < ratio < 12 / 20, "t / (t + 8) of it, for t up to 12"

    process, again = start(task, "again")
    kill_in_the_second_run(process, again)
    assert not (again / "results.json").exists()
    process, _ = start(task, "again")
    code, output = finish(process, 900.0)
    assert code == 0, output
    assert results(again) == results(whole)
    table = [(folder / "results.md").read_text() for folder in (again, whole)]
    assert table[0] == table[1]
