"""train --profile: the phases of one step, each in the table as often as it was called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from pnpo_megatron.loop import Parts
from pnpo_megatron.profiling import StepProfile


def work(*_: object) -> Any:
    return torch.ones(100, 100) @ torch.ones(100, 100)


def test_only_the_chosen_step_is_profiled_and_every_phase_is_counted(tmp_path):
    learner = SimpleNamespace(log_probs=work, update=work, layout="as it was")
    rest = dict.fromkeys(("objective", "begin", "log", "finish_update", "finish_step"))
    plain = Parts(learner=learner, collect=work, compare=work, sync=work, **rest)
    parts = StepProfile(2, tmp_path, rank=0).around(plain)
    assert parts.learner.layout == "as it was"
    for step in (1, 2, 3):
        parts.collect(step)
        parts.learner.log_probs()
        parts.compare()
        for _ in range(4):
            parts.learner.update()
        parts.sync(step)
    folder = tmp_path / "profile"
    assert {one.name for one in folder.iterdir()} == {
        f"step_000002_rank_0.{end}" for end in ("txt", "json.gz")
    }
    rows = [line.split() for line in (folder / "step_000002_rank_0.txt").read_text().splitlines()[1:6]]
    assert [(row[0], row[1]) for row in rows] == [
        ("collect", "1"), ("log_probs", "1"), ("compare", "1"), ("update", "4"), ("sync", "1")
    ]  # fmt: skip
