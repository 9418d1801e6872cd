"""A checkpoint of one layout goes on under another: losses of three further updates (TRAPS H24, H29, H37).

The loss of the first update after a load is computed before any moment is used: only the next two test the
optimizer state, and the control, which leaves it out, must differ there. ``-s`` prints the table of
docs/resume.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from learner_parts import make_learner, random_sequences, share

from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.types import TrainSequence

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]  # `test_model_checkpoint` has a part of it
GATE = {"clip_low": 0.9, "clip_high": 9.0, "dual_clip": 10.0}
"""Wide: a token whose weight lies on a bound would flip with the last bit of its log-prob."""
LIMIT = 5e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from reference_policy import write_model

    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, name) for name in ("qwen2", "mixtral")}


@pytest.fixture(scope="module")
def sequences(folders: dict[str, Path]) -> dict[str, list[TrainSequence]]:
    from reference_policy import ReferencePolicy

    return {
        name: ReferencePolicy(folder).drifted(random_sequences(8, seed=1), 0.02, seed=2)
        for name, folder in folders.items()
    }


def learner_of(folder: Path, sizes: dict[str, Any]) -> Any:
    from pnpo_megatron.policy.optimizer import OptimizerSettings
    from pnpo_megatron.policy.process_groups import ParallelSettings

    optimizer = OptimizerSettings(lr=2e-3, warmup_steps=0, eps=1e-3)
    return make_learner(folder, ParallelSettings(**sizes), optimizer=optimizer, max_tokens=48)


def losses(learner: Any, sequences: list[TrainSequence], count: int) -> list[float]:
    objective = make_objective("grpo", **GATE)
    batch = share(sequences, objective.mean)
    return [learner.update(batch, objective, step=1)["loss"] for _ in range(count)]


def saved(
    folder: Path, sizes: dict[str, Any], sequences: list[TrainSequence], at: Path, portable: bool = True
) -> list[float]:
    """Two updates, save, three more: their losses."""
    from pnpo_megatron.policy.checkpoint import CheckpointSave

    learner = learner_of(folder, sizes)
    losses(learner, sequences, 2)
    CheckpointSave(at, learner.chunks, learner.optimizer, learner.groups, portable=portable).finish()
    return losses(learner, sequences, 3)


def loaded(
    folder: Path, sizes: dict[str, Any], sequences: list[TrainSequence], at: Path, moments: bool = True
) -> list[float]:
    from pnpo_megatron.policy.checkpoint import load_checkpoint

    learner = learner_of(folder, sizes)
    load_checkpoint(at, learner.chunks, learner.optimizer if moments else None, learner.groups)
    return losses(learner, sequences, 3)


TWO_RANKS = {
    "TP2+SP": {"tensor": 2, "sequence": True},
    "PP2": {"pipeline": 2},
    "DP2": {},
    "CP2": {"context": 2},
}


def on_two(folders: dict[str, Path], sequences: dict[str, Any], at: Path) -> dict[str, list[float]]:
    dense, experts = folders["qwen2"], folders["mixtral"]
    found = {"TP2+SP, unbroken": saved(dense, TWO_RANKS["TP2+SP"], sequences["qwen2"], at / "tp")}
    for name, sizes in TWO_RANKS.items():
        found[f"TP2+SP -> {name}"] = loaded(dense, sizes, sequences["qwen2"], at / "tp")
    found["control"] = loaded(dense, {}, sequences["qwen2"], at / "tp", moments=False)
    found["DP2, unbroken"] = saved(dense, {}, sequences["qwen2"], at / "dp", portable=False)
    found["EP2, unbroken"] = saved(experts, {"expert": 2}, sequences["mixtral"], at / "ep")
    found["EP2 -> EP2"] = loaded(experts, {"expert": 2}, sequences["mixtral"], at / "ep")
    found["EP2 -> DP2"] = loaded(experts, {}, sequences["mixtral"], at / "ep")
    return found


def on_one(folders: dict[str, Path], sequences: dict[str, Any], at: Path) -> dict[str, list[float]]:
    return {
        "TP2+SP -> one rank": loaded(folders["qwen2"], {}, sequences["qwen2"], at / "tp"),
        "DP2 -> one rank, dp_reshardable": loaded(folders["qwen2"], {}, sequences["qwen2"], at / "dp"),
        "EP2 -> one rank": loaded(folders["mixtral"], {}, sequences["mixtral"], at / "ep"),
    }


def test_h24_h29_h37_three_updates_after_a_change_of_layout_are_those_of_an_unbroken_run(
    spawn: Any, folders: dict[str, Path], sequences: dict[str, Any], tmp_path: Path
) -> None:
    """TRAPS H24: the vocabulary is padded to another size under TP2; H37: ranks with unequal shares."""
    from reference_policy import ReferencePolicy

    first, second = spawn(on_two, 2, folders, sequences, tmp_path, timeout_s=400)
    assert first == second, "ranks disagree"
    [alone] = spawn(on_one, 1, folders, sequences, tmp_path, timeout_s=200)
    found = first | alone
    scale = {
        name: ReferencePolicy(folder).update(sequences[name], "grpo").scale
        for name, folder in folders.items()
    }
    print("\n| saved -> resumed | update 1 | update 2 | update 3 |\n|---|--:|--:|--:|")
    worst = {}
    for name, values in found.items():
        if "unbroken" not in name:
            whole = found[f"{'TP2+SP' if name == 'control' else name.split(' -> ')[0]}, unbroken"]
            by = scale["mixtral" if name.startswith("EP") else "qwen2"]
            differences = [abs(a - b) / by for a, b in zip(values, whole, strict=True)]
            print(f"| {name} |", " | ".join(f"{one:.1e}" for one in differences), "|")
            worst[name] = max(differences)
    control = worst.pop("control")
    assert max(worst.values()) < LIMIT, worst
    assert control > 100 * LIMIT, "without moments the numbers must differ, or this proves nothing"
    assert worst["TP2+SP -> TP2+SP"] == worst["EP2 -> EP2"] == 0.0, "the same layout goes on bitwise"
