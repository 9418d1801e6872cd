"""The cosine of a later epoch's gradient with the first epoch's, on one rank and on two with shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import GATES, gradients_of, make_learner, random_sequences, share

from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.types import TrainSequence

KEY = "gradient/cosine_first_epoch"
PLAN = [(1, (0, 1, 2)), (1, (3, 4, 5)), (1, (0, 3, 4)), (1, (1, 2, 5)),  # two epochs of a batch
        (2, (0, 1, 2)), (2, (2, 1, 0)), (3, (0, 1, 2)), (3, (0, 1, 2))]  # fmt: skip
UNKNOWN = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reference_policy import write_model

    return write_model(tmp_path_factory.mktemp("model") / "hf")


def course(folder: Path, sequences: list[TrainSequence], distributed: bool) -> list[tuple[Any, Any]]:
    from pnpo_megatron.policy.optimizer import OptimizerSettings

    still = OptimizerSettings(lr=1e-30, warmup_steps=0, clip_grad=0.0, distributed=distributed)
    learner = make_learner(folder, optimizer=still, max_tokens=64, gradient_cosine=True)
    learner.first_epoch.unknown_step = UNKNOWN
    objective, found = make_objective("pnpo", **GATES["pnpo"]), []
    for step, indices in PLAN:
        mini_batch = replace(share([sequences[i] for i in indices], "response"), indices=indices)
        metrics = learner.update(mini_batch, objective, step=step)
        found.append((metrics.get(KEY), None if distributed else gradients_of(learner)))
    return found


def test_the_cosine_is_that_of_the_whole_gradients_under_every_split(spawn: Any, folder: Path) -> None:
    from reference_policy import ReferencePolicy

    sequences = ReferencePolicy(folder).drifted(random_sequences(6, seed=1), 0.05, seed=2)
    [alone] = spawn(course, 1, folder, sequences, False)
    vectors = [torch.cat([one.double().flatten() for one in gradients.values()]) for _, gradients in alone]
    first = vectors[0] + vectors[1]
    wanted = [None, None, *(float(torch.cosine_similarity(first, now, dim=0)) for now in vectors[2:4])]
    wanted += [None, 1.0, None, None]
    assert 0.1 < wanted[2] < 0.999 and wanted[2] != pytest.approx(wanted[3], abs=1e-3)
    ranks = spawn(course, 2, folder, sequences, True, timeout_s=120)
    for rows in (alone, *ranks):
        for (found, _), number in zip(rows, wanted, strict=True):
            assert found == (None if number is None else pytest.approx(number, abs=2e-6))
