"""Two ranks give what one gives: gradients, parameters, log-probs and metrics; also with an idle one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import GATES, gradients_of, make_learner, random_sequences, share, worst_gradient
from torch import Tensor

from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.types import TrainSequence

MACHINE = ("time/update_s", "tokens/per_second", "memory/peak_bytes")
SMOOTH = 1e-3
"""AdamW's eps: at 1e-8 an element whose gradient is nearly 0 moves by the sign of its rounding error."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reference_policy import write_model

    return write_model(tmp_path_factory.mktemp("model") / "hf", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def drifted(folder: Path) -> list[TrainSequence]:
    from reference_policy import ReferencePolicy

    return ReferencePolicy(folder).drifted(random_sequences(9, seed=1), 0.05, seed=2)


def updates(folder: Path, cases: dict[str, list[TrainSequence]]) -> dict[str, Any]:
    """Log-probs, metrics and gradients of every case and objective, on however many ranks there are."""
    learner = make_learner(folder, max_tokens=48)
    found: dict[str, Any] = {}
    for case, sequences in cases.items():
        logprobs = learner.log_probs(share(sequences, "response"))
        for name, gate in GATES.items():
            objective = make_objective(name, **gate)
            metrics = learner.update(share(sequences, objective.mean), objective, step=1)
            found[f"{case} {name}"] = logprobs, metrics, gradients_of(learner)
    return found


def test_h09_h18_h37_two_data_parallel_ranks_give_the_gradient_and_metrics_of_one(
    spawn: Any, folder: Path, drifted: list[TrainSequence]
) -> None:
    """TRAPS H09, H18, H37: unequal counts, a rank without any sample, a rank with only masked ones."""
    masked = replace(drifted[0], response_mask=drifted[0].response_mask & False)
    cases = {
        "nine": drifted,
        "one": drifted[:1],  # the other rank has no sample at all
        "masked": [drifted[0], masked],
        "long and short": [drifted[5], *drifted[:2]],
    }
    [alone] = spawn(updates, 1, folder, cases)
    first, second = spawn(updates, 2, folder, cases, timeout_s=120)
    for case, (logprobs, metrics, gradients) in alone.items():
        assert metrics["update/skipped"] == 0.0, case
        for logprobs_2, metrics_2, gradients_2 in (first[case], second[case]):
            for one, two in zip(logprobs, logprobs_2, strict=True):
                torch.testing.assert_close(two, one, rtol=0, atol=2e-6)
            assert worst_gradient(gradients_2, {name: one.double() for name, one in gradients.items()}) < 5e-6
            for name in set(metrics) - set(MACHINE):
                assert metrics_2[name] == pytest.approx(metrics[name], rel=2e-5, abs=2e-6), f"{case}: {name}"
        for name in set(metrics) - set(MACHINE):
            assert first[case][1][name] == second[case][1][name], f"ranks disagree about {name}"


def trained(folder: Path, sequences: list[TrainSequence], settings: dict[str, Any]) -> dict[str, Tensor]:
    from pnpo_megatron.policy.optimizer import OptimizerSettings

    learner = make_learner(
        folder, max_tokens=48, optimizer=OptimizerSettings(lr=1e-4, warmup_steps=0, eps=SMOOTH, **settings)
    )
    objective = make_objective("pnpo", **GATES["pnpo"])
    for _ in range(3):
        metrics = learner.update(share(sequences, "response"), objective, step=1)
        assert not metrics["update/skipped"]
        list(learner.export_hf())  # readers in between must not disturb a gather that is under way
        learner.log_probs(share(sequences, "response"))
    return {name: tensor.clone() for name, tensor in learner.export_hf()}


WAYS = {
    "plain": {"distributed": False},
    "distributed": {"distributed": True},
    "overlapped": {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
}


def all_ways(folder: Path, sequences: list[TrainSequence]) -> dict[str, dict[str, Tensor]]:
    return {way: trained(folder, sequences, settings) for way, settings in WAYS.items()}


def test_three_updates_move_the_parameters_alike_on_one_and_two_ranks_with_every_optimizer(
    spawn: Any, folder: Path, drifted: list[TrainSequence]
) -> None:
    """Tied embeddings, the distributed optimizer and both overlaps (GPU.md 7)."""
    [start] = spawn(unmoved, 1, folder)
    [alone] = spawn(trained, 1, folder, drifted, WAYS["plain"])
    first, second = spawn(all_ways, 2, folder, drifted, timeout_s=120)
    for way in WAYS:
        for name, weight in alone.items():
            moved = (weight - start[name]).double().norm()
            stored = 2.0**-24 * weight.double().norm()  # float32 parameters round
            assert (first[way][name] - weight).double().norm() < 1e-4 * moved + stored, f"{way}: {name}"
            assert torch.equal(first[way][name], second[way][name]), f"{way}: ranks differ in {name}"


def unmoved(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in make_learner(folder).export_hf()}


def skip_seen_by_one_rank(folder: Path, sequences: list[TrainSequence]) -> tuple[dict[str, float], bool]:
    learner = make_learner(folder, max_tokens=48)
    before = [weight.detach().clone() for weight in learner.chunks[0].parameters()]
    learner.optimizer_settings = replace(learner.optimizer_settings, lr=1e-2)
    metrics = learner.update(share(sequences, "response"), make_objective("pnpo"), step=1)
    after = learner.chunks[0].parameters()
    return metrics, any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_nan_on_one_rank_skips_the_update_on_both(
    spawn: Any, folder: Path, drifted: list[TrainSequence]
) -> None:
    old = drifted[0].old_logprobs.clone()
    old[drifted[0].response_mask] = torch.nan
    results = spawn(skip_seen_by_one_rank, 2, folder, [replace(drifted[0], old_logprobs=old), *drifted[4:6]])
    for metrics, moved in results:
        assert metrics["update/skipped"] == metrics["update/not_finite"] == 1.0
        assert not moved
    for metrics, moved in spawn(skip_seen_by_one_rank, 2, folder, [drifted[0], *drifted[4:6]]):
        assert metrics["update/skipped"] == 0.0 and moved


LAYOUTS = {
    "CP2": {"context": 2},
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence": True},
    "PP2": {"pipeline": 2},
}


def one_layout(folder: Path, sequences: list[TrainSequence], layout: dict[str, Any]) -> Any:
    from pnpo_megatron.policy.optimizer import OptimizerSettings
    from pnpo_megatron.policy.process_groups import ParallelSettings

    optimizer = OptimizerSettings(lr=1e-4, warmup_steps=0, eps=SMOOTH)
    learner = make_learner(folder, ParallelSettings(**layout), optimizer=optimizer, max_tokens=48)
    logprobs = learner.log_probs(share(sequences, "response"))
    rows = [
        learner.update(share(sequences, objective.mean), objective, step=1)
        for objective in (make_objective(name, **gate) for name, gate in GATES.items())
    ]
    return logprobs, rows, {name: tensor.clone() for name, tensor in learner.export_hf()}


def every_layout(folder: Path, sequences: list[TrainSequence]) -> dict[str, Any]:
    return {name: one_layout(folder, sequences, layout) for name, layout in LAYOUTS.items()}


def test_h18_h20_other_splits_of_two_ranks_give_the_same_log_probs_metrics_and_weights(
    spawn: Any, folder: Path, drifted: list[TrainSequence]
) -> None:
    """TRAPS H18, H20: three updates, one of each objective, with the distributed optimizer."""
    [start] = spawn(unmoved, 1, folder)
    [(logprobs, rows, weights)] = spawn(one_layout, 1, folder, drifted, {})
    assert not any(metrics["update/skipped"] for metrics in rows)
    for found in spawn(every_layout, 2, folder, drifted, timeout_s=150):
        for layout, (logprobs_2, rows_2, weights_2) in found.items():
            for one, two in zip(logprobs, logprobs_2, strict=True):
                torch.testing.assert_close(two, one, rtol=0, atol=2e-6)
            for metrics, metrics_2 in zip(rows, rows_2, strict=True):
                for name in set(metrics) - set(MACHINE):
                    assert metrics_2[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-5), (layout, name)
            for name, weight in weights.items():
                moved = (weight - start[name]).double().norm()
                stored = 2.0**-24 * weight.double().norm()  # float32 parameters round
                assert (weights_2[name] - weight).double().norm() < 1e-4 * moved + stored, (layout, name)
