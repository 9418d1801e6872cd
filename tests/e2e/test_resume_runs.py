"""Runs that end in every way a run can end, and go on: the numbers are those of a run that nobody stopped.

Rollouts are replayed (no engine), so that a run lasts a second; `test_kills.py` has the engine's.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from quick_runs import REPLAYED, Kill, run, same_run, write_rollouts
from tiny_task import make_task, read_metrics, write_config

from pnpo_megatron.cli import main

pytestmark = pytest.mark.timeout(600)
UPDATE = "pnpo_megatron.policy.learner:MegatronLearner.update"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("task"))
    write_rollouts(folder / "stored")
    return folder


@pytest.fixture(scope="module")
def flags(task: Path) -> tuple[str, ...]:
    return (*REPLAYED, f"--rollout.replay={task / 'stored'}")


@pytest.fixture(scope="module")
def whole(task: Path, flags: tuple[str, ...], process_server) -> Path:
    codes, output = run(process_server, write_config(task, task / "whole"), *flags)
    assert codes == [0], output
    return task / "whole"


def copy_of(whole: Path, name: str, steps: int) -> Path:
    """The run as it was after `steps`."""
    folder = whole.parent / name
    shutil.copytree(whole, folder)
    for later in (folder / "checkpoints").iterdir():
        if int(later.name[-6:]) > steps:
            shutil.rmtree(later)
    (folder / "latest").write_text(f"step_{steps:06d}\n")
    return folder


def test_a_run_stopped_inside_a_batch_goes_on_from_that_update(task, flags, whole, process_server, capsys):
    """Also: a prompt file that has become unreadable is named, and the run goes on once it is back."""
    config = write_config(task, task / "stopped")
    codes, output = run(process_server, config, *flags, kill=Kill(UPDATE, 6, how=signal.SIGTERM))
    assert codes == [75] and "stopped by a signal after update 6 of step 2" in output, output
    assert len(read_metrics(task / "stopped")) == 6
    assert (task / "stopped" / "exit_code").read_text() == "75\n"
    (task / "prompts.jsonl").rename(task / "away.jsonl")
    assert main(["train", str(config), *flags]) == 2
    assert "prompts.jsonl: no such file" in capsys.readouterr().err
    (task / "away.jsonl").rename(task / "prompts.jsonl")
    codes, output = run(process_server, config, *flags)
    assert codes == [0] and "resuming after step 1 and update 6 inside step 2" in output, output
    same_run(task / "stopped", whole)


def test_h30_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_gone_on_from(
    task, flags, whole, process_server
):
    folder = copy_of(whole, "damaged", steps=2)
    weights = folder / "checkpoints" / "step_000002" / "__0_0.distcp"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    codes, output = run(process_server, write_config(task, folder), *flags)
    assert codes == [0], output
    assert "step_000002 is damaged and passed over: the content of __0_0.distcp changed" in output
    assert "resuming after step 1" in output
    same_run(folder, whole)


def test_changed_settings_are_named_before_anything_starts(task, flags, whole, capsys):
    config = write_config(task, copy_of(whole, "changed", steps=2))
    assert main(["train", str(config), *flags, "--optimizer.lr=1.0", "--rollout.keep=1"]) == 2
    message = capsys.readouterr().err
    assert "optimizer.lr: 0.002 -> 1.0" in message and "--allow-change" in message
    assert "rollout.keep" not in message, "it does not touch the numbers"
    assert main(["train", str(config), *flags, "--from=step_000009"]) == 2
    assert "there are: step_000002, step_000001" in capsys.readouterr().err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB, unmounted at the end."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs more rights than this user has")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_ends_the_run_by_default_and_the_earlier_checkpoint_loads(
    task, flags, whole, process_server, small_disk
):
    folder = copy_of(whole, "full", steps=1)
    shutil.move(folder / "checkpoints", small_disk / "checkpoints")
    (folder / "checkpoints").symlink_to(small_disk / "checkpoints")
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 200_000))
    config = write_config(task, folder)
    codes, output = run(process_server, config, *flags)
    assert codes == [1] and "could not be saved" in output and "so the disk is full" in output, output
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step_000001"]
    (small_disk / "filler").unlink()
    codes, output = run(process_server, config, *flags, "--checkpoint.keep=1")
    assert codes == [0] and "resuming after step 1" in output, output
    same_run(folder, whole)


def test_a_run_can_go_on_without_a_checkpoint_that_does_not_fit(task, flags, whole, process_server):
    folder = task / "goes_on"
    flags = (*flags, "--checkpoint.on_failure=go_on")
    codes, output = run(
        process_server, write_config(task, folder), *flags, patch="full_disk:at_the_second_save"
    )
    assert codes == [0] and 'going on without it (checkpoint.on_failure = "go_on")' in output, output
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000001", "step_000003"]
    same_run(folder, whole)


def test_a_run_does_not_end_well_without_its_last_checkpoint(task, flags, process_server):
    folder = task / "no_last"
    flags = (*flags, "--checkpoint.on_failure=go_on")
    codes, output = run(
        process_server, write_config(task, folder), *flags, patch="full_disk:from_the_second_save_on"
    )
    assert codes == [1] and "step_000003 could not be saved" in output, output
