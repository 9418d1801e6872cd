"""Which checkpoint a run goes on from, which it keeps, what it says to changed settings (TRAPS H30)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pnpo_megatron.errors import ConfigError
from pnpo_megatron.manifest import damage, digest, write_manifest
from pnpo_megatron.resume import (
    RunState,
    candidates,
    changed_settings,
    checkpoint_folder,
    layout_refusal,
    newest_checkpoint,
    newest_sound,
    publish,
    remove_unfinished,
    set_aside,
    whole_checkpoints,
)

CONFIG = {
    "seed": 1, "steps": 4, "optimizer.schedule": "constant", "optimizer.lr": 1e-3, "rollout.keep": 3,
    "parallel.tensor": 1, "parallel.pipeline": 1, "parallel.virtual_pipeline": 1, "parallel.expert": 1,
}  # fmt: skip


def save(run: Path, step: int, update: int | None = None, **state) -> Path:
    """A checkpoint after `step`, or at an update inside it."""
    inside = update is not None
    folder = checkpoint_folder(run, step, (1, update) if inside else None)
    folder.mkdir(parents=True)
    RunState(step=step - inside, update=update or 16 * step, inside=inside, **state).write(folder)
    (folder / "weights").write_bytes(bytes(range(256)) * step)
    seal(folder)
    return folder


def seal(folder: Path) -> None:
    write_manifest(folder, {path.name: digest(path) for path in folder.iterdir()})


def names(run: Path) -> list[str]:
    return [folder.name for folder in whole_checkpoints(run)]


def test_the_state_survives_a_write_and_a_read(tmp_path):
    state = RunState(step=3, update=48, prompts={"pass": 1, "offset": 7}, metrics_bytes=1234, score=0.5)
    state.write(tmp_path)
    assert RunState.read(tmp_path) == state


def test_a_fresh_run_has_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is None and newest_sound([], damage, print) is None


@pytest.mark.parametrize("missing", ["manifest.json", "run_state.json"])
def test_h30_a_folder_that_is_not_whole_is_not_a_checkpoint(tmp_path, missing):
    kept = save(tmp_path, 1)
    publish(tmp_path, kept, keep=3)
    (save(tmp_path, 2) / missing).unlink()
    (tmp_path / "checkpoints" / "step_000003.tmp").mkdir()
    assert newest_checkpoint(tmp_path) == kept
    remove_unfinished(tmp_path)
    assert not (tmp_path / "checkpoints" / "step_000003.tmp").exists()


def test_h30_a_pointer_to_a_missing_folder_falls_back_to_the_newest_whole_one(tmp_path):
    kept = save(tmp_path, 1)
    (tmp_path / "latest").write_text("step_000009\n")
    assert newest_checkpoint(tmp_path) == kept


def test_updates_of_a_step_come_before_its_end_and_after_the_step_before(tmp_path):
    for step, update in ((2, 20), (1, None), (2, 9), (2, None), (10, None), (3, 33)):
        save(tmp_path, step, update)
    assert names(tmp_path) == [
        "step_000010", "step_000003_epoch_1_update_33", "step_000002", "step_000002_epoch_1_update_20",
        "step_000002_epoch_1_update_9", "step_000001",
    ]  # fmt: skip


def test_h30_the_oldest_go_only_after_the_new_one_is_named(tmp_path):
    for step in (1, 2, 3):
        publish(tmp_path, save(tmp_path, step), keep=1)
        assert newest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, step)
        assert names(tmp_path) == [f"step_{step:06d}"]


def test_the_best_by_evaluation_and_the_newest_portable_one_are_kept_beside_the_newest(tmp_path):
    scores = {1: 0.1, 2: 0.9, 3: 0.2, 4: None, 5: 0.3, 6: None}
    for step, score in scores.items():
        publish(tmp_path, save(tmp_path, step, score=score, portable=step == 3), keep=2)
    assert names(tmp_path) == ["step_000006", "step_000005", "step_000003", "step_000002"]


def test_a_future_that_was_given_up_is_not_gone_on_from(tmp_path):
    for step in (1, 2, 3):
        publish(tmp_path, save(tmp_path, step), keep=9)
    publish(tmp_path, checkpoint_folder(tmp_path, 2), keep=9)  # a run that started again --from step 1
    assert [folder.name for folder in candidates(tmp_path)] == ["step_000002", "step_000001"]


def test_a_damaged_newest_one_is_named_set_aside_and_the_one_before_is_taken(tmp_path):
    before, newest = save(tmp_path, 1), save(tmp_path, 2)
    (newest / "weights").write_bytes(b"short")
    said = []

    def pass_over(folder: Path, why: str) -> None:
        said.append((folder.name, why))
        set_aside(folder)

    assert newest_sound(candidates(tmp_path), damage, pass_over) == before
    assert said == [("step_000002", "weights has 5 bytes, 512 were written")]
    assert names(tmp_path) == ["step_000001"] and (newest.parent / "step_000002.damaged").is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew_in_silence(tmp_path):
    (save(tmp_path, 1) / "weights").unlink()
    with pytest.raises(ConfigError, match="no checkpoint is left that is not damaged"):
        newest_sound(candidates(tmp_path), damage, lambda *_: None)


def test_two_hundred_truncations_and_two_hundred_bit_flips_are_found(tmp_path):
    draw = random.Random(7)
    folder = save(tmp_path, 9)
    (folder / "empty").touch()
    (folder / "more").write_bytes(draw.randbytes(50_000))
    seal_again = {path.name: digest(path) for path in folder.iterdir() if path.name != "manifest.json"}
    write_manifest(folder, seal_again)
    assert damage(folder) == []
    files = [path for path in folder.iterdir() if path.stat().st_size]
    assert len(files) == 4, "manifest, state and two more"
    for _ in range(200):
        path = draw.choice(files)
        good = path.read_bytes()
        path.write_bytes(good[: draw.randrange(len(good))])
        assert damage(folder), f"{path.name} cut short"
        at, bit = draw.randrange(len(good)), 1 << draw.randrange(8)
        path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
        assert damage(folder), f"{path.name}: bit {bit} of byte {at}"
        path.write_bytes(good)
    assert damage(folder) == []


def test_ranks_share_the_checking_and_miss_nothing(tmp_path):
    folder = save(tmp_path, 3)
    for name in ("run_state.json", "weights"):
        (folder / name).write_bytes(b"")
    parts = [damage(folder, part, 3) for part in range(3)]
    assert sorted(sum(parts, [])) == sorted(damage(folder)) and len(damage(folder)) == 2


def test_settings_that_change_the_run_are_named_and_the_others_are_not():
    now = CONFIG | {"seed": 2, "steps": 9, "rollout.keep": 0, "parallel.tensor": 2, "new.key": 5}
    assert changed_settings(CONFIG, now) == (["seed: 1 -> 2"], ["parallel.tensor: 1 -> 2"])
    decaying = {"optimizer.schedule": "cosine"}
    assert changed_settings(CONFIG | decaying, now | decaying)[0] == ["seed: 1 -> 2", "steps: 4 -> 9"]


def test_a_state_of_another_layout_names_the_portable_checkpoint_and_what_it_loses(tmp_path):
    save(tmp_path, 2, portable=True)
    state = RunState(step=7, portable=False, config=CONFIG)
    assert layout_refusal(state, CONFIG, whole_checkpoints(tmp_path)) == ""
    other = CONFIG | {"parallel.tensor": 2}
    text = layout_refusal(state, other, whole_checkpoints(tmp_path))
    assert "parallel.tensor = 1" in text and "--from step_000002" in text and "loses 5 steps" in text
    assert layout_refusal(RunState(step=7, config=CONFIG), other, []) == "", "a portable one loads anywhere"
