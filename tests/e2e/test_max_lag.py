"""Generation beside updates (max_lag) and beside scoring (overlap_logprobs), on real parts, with kills."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tiny_task import finish, make_task, read_metrics, start_training, without_times, write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
FLAGS = (
    "--rollout.max_lag=1", "--objective.old_logprobs=rollout", "--rollout.max_mismatch=10", "--eval.every=0",
    "--rollout.dynamic_sampling=true", "--rollout.overlong=mask", "--reward.memory_bytes=3000000000",
)  # fmt: skip


def train(task: Path, name: str, *flags: str, steps: int = 4) -> Path:
    folder = task / name
    code, output = finish(start_training(write_config(task, folder, steps=steps), *FLAGS, *flags), 1500)
    assert code == 0, output
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def whole(task: Path) -> Path:
    return train(task, "whole")


def versions(folder: Path, step: int) -> set[int]:
    lines = (folder / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
    return {json.loads(line)["version"] for line in lines}


def test_batches_are_one_step_behind_and_say_so(whole: Path) -> None:
    assert [versions(whole, step) for step in (1, 2, 3, 4)] == [{0}, {0}, {1}, {2}]
    rows = [row for row in read_metrics(whole) if row["kind"] == "update"]
    firsts = [next(row for row in rows if row["step"] == step) for step in (1, 2, 3, 4)]
    assert [row["rollout/version_lag"] for row in firsts] == [0.0, 1.0, 1.0, 1.0]
    taken = [sum(not row["update/skipped"] for row in rows if row["step"] == step) for step in (1, 2, 3)]
    assert [row["lag"] for row in firsts] == [0, *taken]
    assert all(abs(row["weight/max"] - 1) > 1e-3 for row in firsts[1:]), "the lag shows in the weights"
    assert abs(firsts[0]["weight/max"] - 1) < 1e-3


def test_a_lagging_run_killed_after_a_checkpoint_goes_on_to_the_same_numbers(task: Path, whole: Path) -> None:
    """The batch sampled ahead is on the disk, named by the checkpoint: neither lost nor redrawn."""
    folder = task / "killed"
    process = start_training(write_config(task, folder, steps=4), *FLAGS)
    deadline = time.monotonic() + 900
    while not (folder / "checkpoints" / "step_000002" / "run_state.json").is_file():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    while (folder / "latest").read_text().strip() < "step_000002":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    code, output = finish(start_training(folder.with_suffix(".toml"), *FLAGS), 1500)
    assert code == 0 and "resuming after" in output, output
    assert without_times(read_metrics(folder)) == without_times(read_metrics(whole))


EARLY = ("--rollout.overlap_logprobs=true", "--eval.every=0")


def test_scores_made_beside_generation_are_those_made_after_it_within_rounding(task: Path) -> None:
    """On two ranks; and a run killed once its batch is on the disk scores it to the same bits."""
    rows = {}
    for name, flags in (("late", EARLY[1:]), ("early", EARLY)):
        folder = task / name
        process = start_training(write_config(task, folder, steps=2), *flags, ranks=2)
        code, output = finish(process, 1500)
        assert code == 0, output
        rows[name] = [row for row in without_times(read_metrics(folder)) if row["kind"] == "update"]
    for late, early in zip(rows["late"], rows["early"], strict=True):
        assert early["weight/max"] == pytest.approx(late["weight/max"], abs=1e-4)
        assert early["loss"] == pytest.approx(late["loss"], abs=1e-3)
    assert rows["early"][0]["gate/rejected_fraction"] == 0.0

    folder = task / "early_killed"
    process = start_training(write_config(task, folder, steps=2), *EARLY, ranks=2)
    deadline = time.monotonic() + 900
    while not (folder / "rollouts" / "step_000002.jsonl").is_file():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    for rank in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(rank), signal.SIGKILL)
    process.communicate(timeout=300)
    code, output = finish(start_training(folder.with_suffix(".toml"), *EARLY, ranks=2), 1500)
    assert code == 0 and "its rollouts are on the disk" in output, output
    again = [row for row in without_times(read_metrics(folder)) if row["kind"] == "update"]
    assert again == rows["early"]
