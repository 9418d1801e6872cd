"""Save, load, go on: bitwise the run that never stopped, also under another layout (TRAPS H21, H29)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_hf_model, save_hf_model
from tiny_run import TinyRun
from torch import Tensor

from pnpo_megatron.errors import ConversionError

SAVED_AT, UPDATES = 2, 5  # the first update after a load uses no moment yet: three go on


def unbroken(
    folder: Path,
    sizes: dict[str, Any],
    at: Path,
    *,
    portable: bool,
    saved_at: int = SAVED_AT,
    **settings: Any,
) -> dict[str, Tensor]:
    """Five updates, saving before update `saved_at` (from 0)."""
    from pnpo_megatron.policy.checkpoint import CheckpointSave

    run = TinyRun(folder, sizes, **settings)
    for number in range(UPDATES):
        if number == saved_at:
            save = CheckpointSave(
                at, run.chunks, run.optimizer, run.groups, portable=portable, source=run.source
            )
            save.finish()
        run.update(number)
    return run.export()


def resumed(
    folder: Path,
    sizes: dict[str, Any],
    at: Path,
    *,
    with_optimizer: bool = True,
    saved_at: int = SAVED_AT,
    **settings: Any,
) -> dict[str, Tensor]:
    """The updates from `saved_at` on, from the checkpoint."""
    from pnpo_megatron.policy.checkpoint import load_checkpoint

    run = TinyRun(folder, sizes, load=False, **settings)
    load_checkpoint(at, run.chunks, run.optimizer if with_optimizer else None, run.groups)
    for number in range(saved_at, UPDATES):
        run.update(number)
    return run.export()


def same(left: dict[str, Tensor], right: dict[str, Tensor], atol: float = 0.0) -> float:
    assert list(left) == list(right)
    worst = max(float((left[name] - right[name]).abs().max()) for name in left)
    assert worst <= atol, worst
    return worst


def one_rank(folder: str, work: str) -> dict[str, Any]:
    source, base = Path(folder), Path(work)
    results: dict[str, Any] = {}
    for name, settings in {
        "distributed": {"distributed": True},
        "plain": {"distributed": False},
        "bfloat16": {"distributed": True, "dtype": torch.bfloat16},
    }.items():
        whole = unbroken(source, {}, base / name, portable=True, **settings)
        results[name] = same(resumed(source, {}, base / name, **settings), whole)
        # A run whose first updates were all skipped has made no moments yet.
        whole = unbroken(source, {}, base / f"{name}-early", portable=True, saved_at=0, **settings)
        early = resumed(source, {}, base / f"{name}-early", saved_at=0, **settings)
        results[f"{name}, before any update"] = same(early, whole)
    # The moments matter: without them the numbers must differ, or this test proves nothing.
    whole = unbroken(source, {}, base / "again", portable=True, distributed=True)
    without = resumed(source, {}, base / "again", with_optimizer=False, distributed=True)
    results["without moments"] = max(float((without[name] - whole[name]).abs().max()) for name in whole)
    return results


def two_ranks(folder: str, work: str) -> dict[str, Any]:
    source, base = Path(folder), Path(work)
    whole = unbroken(source, {}, base / "dp2", portable=True, distributed=True)
    results = {"DP2 -> DP2": same(resumed(source, {}, base / "dp2", distributed=True), whole)}
    for name, sizes in {"TP2+SP": {"tensor": 2, "sequence": True}, "PP2": {"pipeline": 2}}.items():
        results[f"DP2 -> {name}"] = same(
            resumed(source, sizes, base / "dp2", distributed=True), whole, atol=3e-6
        )
    settings = {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    whole = unbroken(source, {}, base / "dp2-bucket", portable=False, **settings)
    try:
        resumed(source, {"tensor": 2}, base / "dp2-bucket", distributed=True)
    except ConversionError as error:
        results["refused"] = str(error)
    results["DP2 -> DP2, dp_reshardable, overlap"] = same(
        resumed(source, {}, base / "dp2-bucket", **settings), whole
    )
    return results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_hf_model(
        make_hf_model("qwen2", tie_word_embeddings=True, num_hidden_layers=2), tmp_path / "hf"
    )


def test_h29_one_rank_resumes_bitwise(spawn, folder, tmp_path):
    (results,) = spawn(one_rank, 1, str(folder), str(tmp_path), timeout_s=120)
    assert results.pop("without moments") > 1e-3
    assert len(results) == 6 and set(results.values()) == {0.0}, results


def test_h21_h29_two_ranks_resume_bitwise_and_under_other_layouts(spawn, folder, tmp_path):
    for results in spawn(two_ranks, 2, str(folder), str(tmp_path), timeout_s=150):
        assert "state for parallel.tensor = 1, parallel.pipeline = 1" in results.pop("refused")
        assert len(results) == 4
    published = sorted(path.name for path in tmp_path.iterdir())
    assert published == ["dp2", "dp2-bucket", "hf"]  # nothing half-written is left
    assert (tmp_path / "dp2" / "hf" / "chat_template.jinja").read_text() == (
        folder / "chat_template.jinja"
    ).read_text()


class Planted:
    """What an attacker would put into a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("planted"),))


def plant(folder: str, work: str) -> dict[str, str]:
    import os
    import pickle

    os.chdir(work)
    from pnpo_megatron.policy.checkpoint import CheckpointSave, load_checkpoint

    run, at = TinyRun(Path(folder), {}), Path(work) / "checkpoint"
    refused = {}
    for file in (".metadata", "common.pt"):
        CheckpointSave(at, run.chunks, run.optimizer, run.groups).finish()
        if file == ".metadata":
            (at / file).write_bytes(pickle.dumps(Planted()))
        else:
            torch.save({"content_metadata": Planted()}, at / file)
        try:
            load_checkpoint(at, run.chunks, run.optimizer, run.groups)
        except (ConversionError, pickle.UnpicklingError) as error:
            refused[file] = str(error)
    return refused


def test_nothing_in_a_checkpoint_is_run(spawn, folder, tmp_path):
    (refused,) = spawn(plant, 1, str(folder), str(tmp_path))
    assert "pathlib.Path.touch" in refused[".metadata"]
    assert "Weights only load failed" in refused["common.pt"]
    assert not (tmp_path / "planted").exists()
