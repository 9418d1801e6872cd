"""Mixtures of experts: the policy gradient is a plain sum; auxiliary losses keep their scale when split."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_hf_model, save_hf_model
from learner_parts import GATES, make_learner, random_sequences, share

from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.types import TrainSequence

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "EP2": {"expert": 2},
    "CP2": {"context": 2},
    "TP2+SP": {"tensor": 2, "sequence": True},
    "TP2+SP+EP2": {"tensor": 2, "sequence": True, "expert": 2},
    "PP2": {"pipeline": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reference_policy import write_model

    return write_model(tmp_path_factory.mktemp("model") / "hf", "mixtral")


def run(
    folder: Path, sequences: list[TrainSequence], layouts: dict[str, Any], megatron: dict[str, Any]
) -> Any:
    """Layout -> metrics of one pnpo update, a few sequences a micro-batch."""
    from pnpo_megatron.policy.process_groups import ParallelSettings

    found = {}
    for name, layout in layouts.items():
        learner = make_learner(folder, ParallelSettings(**layout), megatron=megatron, max_tokens=32)
        objective = make_objective("pnpo", **GATES["pnpo"])
        found[name] = learner.update(share(sequences, "response"), objective, step=1)
    return found


def test_h22_loss_and_gradient_norm_of_experts_are_the_formulas_under_every_split(
    spawn: Any, folder: Path
) -> None:
    from reference_policy import ReferencePolicy

    policy = ReferencePolicy(folder)
    sequences = policy.drifted(random_sequences(9, seed=1), 0.05, seed=2)
    reference = policy.update(sequences, "pnpo")
    norm = math.sqrt(sum(float(one.square().sum()) for one in reference.gradients.values()))
    [alone] = spawn(run, 1, folder, sequences, {"one rank": {}}, {})
    first, second = spawn(run, 2, folder, sequences, LAYOUTS, {}, timeout_s=120)
    for found in (alone, first, second):
        for layout, metrics in found.items():
            assert abs(metrics["loss"] - reference.loss) / reference.scale < 5e-6, layout
            assert metrics["grad_norm"] == pytest.approx(norm, rel=5e-6), layout


def run_replayed(folder: Path, layout: dict[str, Any]) -> dict[str, float]:
    """Metrics of one update on the routes of its old log-probs, without a distributed optimizer."""
    from pnpo_megatron.policy.process_groups import ParallelSettings

    learner = make_learner(
        folder, ParallelSettings(**layout), megatron={"moe_enable_routing_replay": True}, max_tokens=32
    )
    mini_batch = share(random_sequences(5, seed=1), "response")
    old = learner.log_probs(mini_batch)
    sequences = [
        replace(one, old_logprobs=scored) for one, scored in zip(mini_batch.sequences, old, strict=True)
    ]
    metrics = learner.update(share(sequences, "response"), make_objective("pnpo", **GATES["pnpo"]), step=1)
    return {key: metrics[key] for key in ("loss", "grad_norm", "weight/max", "moe/max_load")}


def test_a_pipeline_stage_without_experts_takes_part_in_norm_and_routes(spawn: Any, tmp_path: Path) -> None:
    """The first of two layers is dense, and alone on its stage: no router and no expert to optimise there."""
    folder = save_hf_model(make_hf_model("deepseek_v3", num_hidden_layers=2), tmp_path / "hf")
    [wanted] = spawn(run_replayed, 1, folder, {})
    assert wanted["weight/max"] == 1.0, "routes are replayed"
    for found in spawn(run_replayed, 4, folder, {"pipeline": 2, "expert": 2}, timeout_s=120):
        assert found == pytest.approx(wanted, rel=5e-6)


def test_h22_the_scale_of_auxiliary_losses_does_not_depend_on_the_split(spawn: Any, folder: Path) -> None:
    """TRAPS H22, GPU.md 11: with equal micro-batches their value is the same too, so the norms must agree."""
    from reference_policy import ReferencePolicy

    one = replace(random_sequences(1, seed=11)[0], advantage=1e-3)  # the auxiliary losses dominate
    [one] = ReferencePolicy(folder).drifted([one], 0.001, seed=12)
    megatron = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.1,
    }
    sequences = [one] * 4
    [without] = spawn(run, 1, folder, sequences, {"one rank": {}}, {})
    [alone] = spawn(run, 1, folder, sequences, {"one rank": {}}, megatron)
    wanted = alone["one rank"]["grad_norm"]
    assert wanted > 10 * without["one rank"]["grad_norm"]
    for found in spawn(run, 2, folder, sequences, LAYOUTS, megatron, timeout_s=120):
        for layout, metrics in found.items():
            assert metrics["grad_norm"] == pytest.approx(wanted, rel=1e-5), layout


def test_grouped_experts_are_the_formulas_under_every_split(spawn: Any, folder: Path) -> None:
    from reference_policy import ReferencePolicy

    policy = ReferencePolicy(folder)
    sequences = policy.drifted(random_sequences(9, seed=1), 0.05, seed=2)
    reference = policy.update(sequences, "pnpo")
    norm = math.sqrt(sum(float(one.square().sum()) for one in reference.gradients.values()))
    for found in spawn(run, 2, folder, sequences, LAYOUTS, {"moe_grouped_gemm": True}, timeout_s=120):
        for layout, metrics in found.items():
            assert abs(metrics["loss"] - reference.loss) / reference.scale < 5e-6, layout
            assert metrics["grad_norm"] == pytest.approx(norm, rel=5e-6), layout


def run_updates(folder: Path, sequences: list[TrainSequence]) -> dict[bool, list[float]]:
    """Grouped or not -> losses of updates whose weights are gathered while the next forward pass runs."""
    from pnpo_megatron.policy.optimizer import OptimizerSettings
    from pnpo_megatron.policy.process_groups import ParallelSettings

    found = {}
    for grouped in (False, True):
        learner = make_learner(
            folder,
            ParallelSettings(tensor=2, sequence=True),
            optimizer=OptimizerSettings(
                lr=1e-2, warmup_steps=0, overlap_grad_reduce=True, overlap_param_gather=True
            ),
            megatron={"moe_grouped_gemm": grouped},
            max_tokens=32,
        )
        objective = make_objective("pnpo", gate_low=0.5, gate_high=0.5)
        rows = [learner.update(share(sequences, "response"), objective, step=1) for _ in range(4)]
        found[grouped] = [row["loss"] for row in rows]
    return found


def test_grouped_experts_wait_for_weights_that_are_still_on_the_way(spawn: Any, folder: Path) -> None:
    from reference_policy import ReferencePolicy

    sequences = ReferencePolicy(folder).drifted(random_sequences(9, seed=1), 0.05, seed=2)
    for found in spawn(run_updates, 2, folder, sequences, timeout_s=120):
        assert found[True] == pytest.approx(found[False], rel=1e-4)
        assert abs(found[False][-1] - found[False][0]) > 0.1


def run_biases(folder: Path, layouts: dict[str, Any]) -> dict[str, Any]:
    """Layout -> load and biases after an update that is taken and one that is skipped, by layer."""
    from pnpo_megatron.policy.process_groups import ParallelSettings

    found = {}
    for name, layout in layouts.items():
        learner = make_learner(folder, ParallelSettings(**layout), max_tokens=64, moe_bias_rate=0.25)
        routers = {one.layer_number: one for chunk in learner.routing.routers for one in chunk}
        before = {layer: one.expert_bias.clone() for layer, one in routers.items()}
        sequences = even_sequences()
        objective = make_objective("pnpo", gate_low=0.5, gate_high=0.5)
        for rows in (sequences, [replace(one, advantage=0.0) for one in sequences]):
            learner.update(share(rows, "response"), objective, step=1)
            if rows is sequences:
                load = learner.routing._over_ranks(learner.routing.load).clone()
        moved = {layer: (one.expert_bias - before[layer]).tolist() for layer, one in routers.items()}
        found[name] = {"load": load.tolist(), "moved": moved}
    return found


def even_sequences() -> list[TrainSequence]:
    """Without padding under any of the layouts, so that loads can be equal to a token."""
    whole = [one for one in random_sequences(60, seed=4) if len(one.ids) % 8 == 0 and one.length]
    return [replace(one, old_logprobs=torch.zeros(len(one.ids))) for one in whole]


def test_biases_of_experts_move_against_their_load_unless_the_update_is_skipped(
    spawn: Any, tmp_path: Path
) -> None:
    folder = save_hf_model(make_hf_model("deepseek_v3", num_hidden_layers=2), tmp_path / "hf")
    [alone] = spawn(run_biases, 1, folder, {"one rank": {}})
    wanted = alone["one rank"]
    tokens = sum(len(one.ids) for one in even_sequences())
    for layer, moved in wanted["moved"].items():
        load = torch.tensor(wanted["load"][layer - 1])
        assert load.sum() % tokens == 0 and load.unique().numel() > 1
        assert moved == (0.25 * torch.sign(load.mean() - load)).tolist(), "once, not twice"
    first, second = spawn(run_biases, 2, folder, {key: LAYOUTS[key] for key in ("DP2", "EP2", "PP2")})
    for layout in first:
        assert first[layout]["load"] == second[layout]["load"] == wanted["load"], layout
        assert second[layout]["moved"] == wanted["moved"], layout
    assert first["EP2"]["moved"] == wanted["moved"] and not first["PP2"]["moved"], "its layer is dense"
