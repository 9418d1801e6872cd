"""Which checkpoint a run goes on from (TRAPS H30)."""

from __future__ import annotations

from pathlib import Path

from pnpo_megatron.resume import (
    RunState,
    checkpoint_folder,
    complete_checkpoints,
    newest_checkpoint,
    publish,
)


def save(run: Path, step: int) -> Path:
    folder = checkpoint_folder(run, step)
    folder.mkdir(parents=True)
    RunState(step=step, update=16 * step).write(folder)
    return folder


def test_the_state_survives_a_write_and_a_read(tmp_path):
    state = RunState(step=3, update=48, prompts={"pass": 1, "offset": 7}, metrics_bytes=1234)
    state.write(tmp_path)
    assert RunState.read(tmp_path) == state


def test_a_fresh_run_has_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is None


def test_a_folder_without_state_is_not_a_checkpoint(tmp_path):
    kept = save(tmp_path, 1)
    publish(tmp_path, kept, keep=3)
    (tmp_path / "checkpoints" / "step_000002").mkdir()
    assert newest_checkpoint(tmp_path) == kept


def test_a_pointer_to_a_missing_folder_falls_back_to_the_newest_complete_one(tmp_path):
    kept = save(tmp_path, 1)
    (tmp_path / "latest").write_text("step_000009\n")
    assert newest_checkpoint(tmp_path) == kept


def test_keep_removes_the_oldest_only_after_the_new_one_is_named(tmp_path):
    for step in (1, 2, 3):
        publish(tmp_path, save(tmp_path, step), keep=1)
        assert newest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, step)
        assert [folder.name for folder in complete_checkpoints(tmp_path)] == [f"step_{step:06d}"]
