"""Grouped experts on one GPU: the update of experts that are computed one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_grouped_experts_make_the_same_update(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    from learner_parts import make_learner, random_sequences, share, with_old
    from reference_policy import write_model

    from pnpo_megatron.algorithm.presets import make_objective
    from pnpo_megatron.policy.process_groups import start_distributed

    start_distributed()
    folder = write_model(tmp_path / "hf", "qwen3_moe")
    found = []
    for grouped in (False, True):
        learner = make_learner(folder, dtype=dtype, megatron={"moe_grouped_gemm": grouped}, max_tokens=96)
        plain = random_sequences(12, seed=1)
        sequences = with_old(plain, [torch.zeros(len(one.ids)) for one in plain])
        found.append(learner.update(share(sequences, "response"), make_objective("pnpo"), step=1))
    assert found[1]["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=tolerance)
    assert found[1]["log_ratio/std"] == pytest.approx(found[0]["log_ratio/std"], rel=tolerance)
