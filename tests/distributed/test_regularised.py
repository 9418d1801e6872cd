"""A pull to the first weights and one to entropy: the formulas' gradient however split; weights come back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import GATES, gradients_of, make_learner, random_sequences, share, with_old, worst_gradient

from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.types import TrainSequence

COEFFICIENTS = {"kl_coef": 0.7, "entropy_coef": 0.3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "CP2": {"context": 2},
    "TP2+SP": {"tensor": 2, "sequence": True},
    "PP2": {"pipeline": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reference_policy import write_model

    return write_model(tmp_path_factory.mktemp("model") / "hf", tie_word_embeddings=True)


def sequences_of(policy: Any) -> list[TrainSequence]:
    """Old and reference log-probs at different distances from the policy's own."""
    old = policy.drifted(random_sequences(9, seed=1), 0.05, seed=2)
    far = policy.drifted(random_sequences(9, seed=1), 0.5, seed=3)
    pairs = zip(old, far, strict=True)
    return [replace(one, reference_logprobs=other.old_logprobs) for one, other in pairs]


def penalty(policy: Any, sequences: list[TrainSequence]) -> float:
    """sum over trained tokens of share (kl (exp(d) - d - 1) - entropy H), float64; gradients are added."""
    responses = sum(bool(one.response_mask.any()) for one in sequences)
    total = 0.0
    for one in sequences:
        mask = one.response_mask[1:]
        if mask.any():
            log_p = policy.model(one.ids[None]).logits[0, :-1].log_softmax(-1)[mask]
            d = one.reference_logprobs[1:][mask].double() - log_p.gather(1, one.ids[1:][mask, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            value = (0.7 * (d.exp() - d - 1) - 0.3 * entropy).sum() / (int(mask.sum()) * responses)
            value.backward()
            total += float(value.detach())
    return total


def run(folder: Path, sequences: list[TrainSequence], layouts: dict[str, Any]) -> dict[str, Any]:
    from pnpo_megatron.policy.process_groups import ParallelSettings

    found = {}
    for name, layout in layouts.items():
        learner = make_learner(folder, ParallelSettings(**layout), max_tokens=48, **COEFFICIENTS)
        objective = make_objective("pnpo", **GATES["pnpo"])
        metrics = learner.update(share(sequences, "response"), objective, step=1)
        found[name] = metrics, gradients_of(learner) if not layout else {}
    return found


def test_loss_and_gradient_are_the_formulas_under_every_split(spawn: Any, folder: Path) -> None:
    from reference_policy import ReferencePolicy

    policy = ReferencePolicy(folder)
    sequences = sequences_of(policy)
    plain = policy.update(sequences, "pnpo")
    added = penalty(policy, sequences)
    wanted = {name: value.grad for name, value in policy.model.named_parameters()}
    norm = math.sqrt(sum(float(one.square().sum()) for one in wanted.values()))
    assert abs(added) > 0.1 * plain.scale and norm > 0.0
    [alone] = spawn(run, 1, folder, sequences, {"one rank": {}})
    first, second = spawn(run, 2, folder, sequences, LAYOUTS, timeout_s=120)
    for found in (alone, first, second):
        for layout, (metrics, gradients) in found.items():
            assert abs(metrics["loss"] - plain.loss - added) / (plain.scale + abs(added)) < 5e-6, layout
            assert metrics["grad_norm"] == pytest.approx(norm, rel=5e-6), layout
            if gradients:
                assert worst_gradient(gradients, wanted) < 5e-6, layout


def run_reference(folder: Path, layouts: dict[str, Any]) -> dict[str, Any]:
    """Layout -> whether the first weights say what they said, and the present ones are unharmed."""
    from pnpo_megatron.policy.optimizer import OptimizerSettings
    from pnpo_megatron.policy.process_groups import ParallelSettings

    found = {}
    for name, layout in layouts.items():
        learner = make_learner(
            folder,
            ParallelSettings(**layout),
            optimizer=OptimizerSettings(lr=1e-2, warmup_steps=0),
            max_tokens=48,
            kl_coef=0.1,
        )
        batch = random_sequences(9, seed=1)
        before = learner.log_probs(share(batch, "response"))
        batch = [replace(one, reference_logprobs=old) for one, old in zip(batch, before, strict=True)]
        scored = share(with_old(batch, before), "response")
        learner.update(scored, make_objective("pnpo", gate_low=0.5, gate_high=0.5), step=1)
        moved = learner.log_probs(scored)
        again = learner.reference_log_probs(scored)
        found[name] = {
            "first": all(map(torch.equal, before, again)),
            "present": all(map(torch.equal, moved, learner.log_probs(scored))),
            "moved": max(float((a - b).abs().max()) for a, b in zip(before, moved, strict=True)),
        }
    return found


def test_the_first_weights_score_bit_for_bit_and_the_present_ones_come_back(spawn: Any, folder: Path) -> None:
    for found in spawn(run_reference, 2, folder, LAYOUTS, timeout_s=120):
        for layout, one in found.items():
            assert one["first"] and one["present"] and one["moved"] > 1e-3, layout
