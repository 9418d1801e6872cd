"""What a study file means, and who works on which run; whole studies are run in tests/e2e."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pnpo_megatron.durable import locked
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.study import read_study

STUDY = """
config = "{folder}/config.toml"
folder = "{folder}/out"
updates = 48
evaluate_every = 16
seeds = [3, 4]
[common]
optimizer.lr = 1e-4
[settings.grpo]
objective.name = "grpo"
[settings.pnpo]
objective.gate_low = 0.5
[grid]
objective.epochs = [1, 4]
"""
CONFIG = """
[model]
hf = "base"
[data]
prompts = "prompts.jsonl"
[rollout]
prompts = 32
[objective]
mini_batch = 16
gate_low = 0.1
gate_high = 0.2
"""


def write(folder: Path, **changes: str) -> Path:
    text = STUDY.format(folder=folder)
    for key, value in changes.items():
        lines = [f"{key} = {value}" if line.startswith(f"{key} =") else line for line in text.splitlines()]
        text = "\n".join(
            lines if any(line.startswith(key) for line in lines) else [f"{key} = {value}", *lines]
        )
    (folder / "config.toml").write_text(CONFIG)
    (folder / "study.toml").write_text(text)
    return folder / "study.toml"


def test_every_run_takes_the_budget_in_updates_and_is_evaluated_after_the_same_ones(tmp_path):
    study = read_study(write(tmp_path))
    assert study.settings == ("grpo epochs=1", "grpo epochs=4", "pnpo epochs=1", "pnpo epochs=4")
    assert [(cell.setting, cell.seed) for cell in study.cells] == [
        (setting, seed) for seed in (3, 4) for setting in study.settings
    ]
    assert study.baseline == "grpo epochs=1"
    for cell in study.cells:
        config = cell.config
        per_step = config.objective.epochs * 2
        assert (config.steps * per_step, config.eval.every * per_step) == (48, 16)
        assert (config.seed, config.optimizer.lr) == (cell.seed, 1e-4)
    assert len({cell.config.run.folder for cell in study.cells}) == 8


def test_a_named_objective_takes_nothing_of_the_configurations_own(tmp_path):
    cells = {cell.setting: cell.config.objective for cell in read_study(write(tmp_path)).cells}
    assert cells["grpo epochs=4"].gate_low is None and cells["grpo epochs=4"].mini_batch == 16
    assert (cells["pnpo epochs=4"].gate_low, cells["pnpo epochs=4"].gate_high) == (0.5, 0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"updates": "44"}, "updates = 44: grpo epochs=4 takes 8 updates a rollout batch"),
        ({"evaluate_every": "4"}, "evaluate_every = 4: grpo epochs=4"),
        ({"evaluate_evry": "4"}, "evaluate_evry: missing or unknown"),
        ({"baseline": '"gspo"'}, "baseline = 'gspo': expected one of grpo epochs=1"),
        ({"optimizer.lr": '"fast"'}, "optimizer.lr = 'fast'"),
    ],
)
def test_a_study_that_cannot_be_run_is_refused_with_the_way_out(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_study(write(tmp_path, **changes))


def test_a_run_that_another_process_works_on_is_left_to_it_and_freed_when_it_is_killed(tmp_path):
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "1\n"
    with locked(tmp_path / "lock") as mine:
        assert not mine
    other.kill()
    other.communicate()
    with locked(tmp_path / "lock") as mine:
        assert mine
