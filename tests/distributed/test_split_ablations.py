"""Every ablation under context and data parallelism against a float64 reference; one launch."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from ablation_reference import ABLATIONS, slopes
from learner_parts import share
from matrix_cases import Case, Fixture, make_fixture, plain_model
from matrix_ranks import learner_of, whole_gradients
from torch import Tensor

from pnpo_megatron.algorithm import make_objective

CASES = {"CP2": Case(2, {"context": 2}), "DP2": Case(2)}


def reference(fixture: Fixture, how: dict) -> tuple[float, float, dict[str, Tensor]]:
    """(loss, its scale, gradients) of one process in float64, with the naive formulas' coefficients."""
    model = plain_model(fixture.folder, "dense")
    rows, policy = [one for one in fixture.sequences if one.length], []
    for one in rows:
        scores = model.logits(one.ids)[:-1].log_softmax(-1)
        policy.append(scores.gather(1, one.ids[1:, None]).squeeze(1)[one.response_mask[1:]])
    ratios = [
        (new.detach() - one.old_logprobs[one.response_mask].double()).tolist()
        for new, one in zip(policy, rows, strict=True)
    ]
    found = slopes([(ratio, one.advantage) for ratio, one in zip(ratios, rows, strict=True)], how)
    terms = [torch.tensor(slope, dtype=torch.float64) * new for slope, new in zip(found, policy, strict=True)]
    sum(one.sum() for one in terms).backward()
    gradients = {name: one.grad.clone() for name, one in model.weights.items()}
    scale = sum(float(one.detach().abs().sum()) for one in terms)
    return sum(float(one.detach().sum()) for one in terms), scale, gradients


def update_all(stored: bytes) -> dict[tuple[str, str], Any]:
    from dataclasses import replace

    fixture: Fixture = pickle.loads(stored)
    found: dict[tuple[str, str], Any] = {}
    for layout, case in CASES.items():
        learner = learner_of(case, fixture)
        longest = learner.layout.pad(max(len(one.ids) for one in fixture.sequences))
        learner.settings = replace(learner.settings, max_tokens=longest // learner.groups.cp_size)
        for name, how in ABLATIONS.items():
            objective = make_objective("pnpo", **how)
            metrics = learner.update(share(fixture.sequences, objective.mean), objective, step=1)
            found[layout, name] = metrics, whole_gradients(learner)
    return found


def test_every_ablation_gives_the_reference_gradient_and_the_same_metrics_under_every_split(
    spawn: Any, tmp_path: Any
) -> None:
    fixture = make_fixture(tmp_path / "dense", "dense")
    answers = {name: reference(fixture, how) for name, how in ABLATIONS.items()}
    ranks = spawn(update_all, 2, pickle.dumps(fixture), timeout_s=300)
    for found in ranks:
        for (layout, name), (metrics, gradients) in found.items():
            loss, scale, wanted = answers[name]
            assert abs(metrics["loss"] - loss) / scale < 5e-6, (layout, name)
            for tensor, gradient in gradients.items():
                error = float((gradient.double() - wanted[tensor]).norm() / wanted[tensor].norm())
                assert error < 5e-6, (layout, name, tensor)
            for key, value in found["DP2", name][0].items():
                if key.startswith(("gate/", "weight/", "ladder/")):
                    assert abs(metrics[key] - value) <= 1e-6 * max(1.0, abs(value)), (layout, name, key)
