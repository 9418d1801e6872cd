"""Mixtures of experts through the whole loop: vLLM samples, experts are synced, the reward rises."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from tiny_task import finish, make_task, read_metrics, start_training, write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 6
SETTINGS = (
    "--model.moe_aux_loss=0.01", "--model.router_replay=true", "--eval.benchmarks=[]",
    "--checkpoint.every=0", "--export.every=0",
)  # fmt: skip


def train(task: Path, name: str, ranks: int, *flags: str) -> list[dict]:
    folder = task / name
    config = write_config(task, folder, STEPS)
    code, output = finish(start_training(config, *SETTINGS, *flags, ranks=ranks), timeout_s=1200)
    assert code == 0, output
    return [row for row in read_metrics(folder) if row["kind"] == "update"]


@pytest.mark.parametrize(("family", "ranks", "flags"), [
    ("qwen3_moe", 1, ()),
    ("qwen3_moe", 2, ("--parallel.expert=2",)),
    ("mixtral", 1, ()),
    ("mixtral", 2, ("--parallel.expert=2", "--model.router_replay=false")),
])  # fmt: skip
def test_a_run_improves_its_reward(tmp_path: Path, family: str, ranks: int, flags: tuple[str, ...]) -> None:
    rows = train(make_task(tmp_path, family), "run", ranks, *flags)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 1.0, rewards
    gaps = [row["mismatch/max_abs"] for row in rows if "mismatch/max_abs" in row]
    assert max(gaps) < 1e-4, "every expert of the learner reached the engine"
    firsts = [row for row in rows if "reward/mean" in row]
    assert all(row["weight/min"] == row["weight/max"] == 1.0 for row in firsts)
    assert all(1.0 <= row["moe/max_load"] <= 4.0 and row["moe/idle_experts"] <= 0.5 for row in rows)
