"""Memory settings change memory, not numbers; a profiled update names where it goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pnpo_megatron.algorithm import make_objective

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2": {
        "mlp again": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        "fused SwiGLU": {"bias_activation_fusion": True},
    },
    "qwen3_moe": {
        "experts again": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        "fused SwiGLU": {"bias_activation_fusion": True},
        "layers again": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    },
}


def norms(folder: Path, megatron: dict[str, Any]) -> tuple[float, float]:
    from learner_parts import make_learner, random_sequences, share, with_old

    learner = make_learner(folder, max_tokens=96, megatron=megatron)
    sequences = random_sequences(9, seed=1)
    scored = with_old(sequences, learner.log_probs(share(sequences, "response")))
    objective = make_objective("pnpo", gate_low=0.5, gate_high=0.5)
    metrics = learner.update(share(scored, "response"), objective, step=1)
    return metrics["loss"], metrics["grad_norm"]


@pytest.mark.parametrize("family", list(SETTINGS))
def test_settings_of_memory_leave_loss_and_gradient(tmp_path: Path, family: str) -> None:
    from reference_policy import write_model

    from pnpo_megatron.policy.process_groups import start_distributed

    start_distributed()
    folder = write_model(tmp_path / "hf", family)
    plain = norms(folder, {})
    for name, megatron in SETTINGS[family].items():
        assert norms(folder, megatron) == pytest.approx(plain, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize(
    ("dtype", "distributed"), [("bfloat16", True), ("bfloat16", False), ("float32", True)]
)
def test_the_doctor_s_state_is_what_is_held(tmp_path: Path, dtype: str, distributed: bool) -> None:
    from learner_parts import make_learner
    from measured_state import measured_state
    from reference_policy import write_model

    from pnpo_megatron.parallel.settings import ParallelSettings
    from pnpo_megatron.planning.shards import chunks_of, state_bytes
    from pnpo_megatron.policy.optimizer import OptimizerSettings
    from pnpo_megatron.policy.process_groups import start_distributed

    start_distributed()
    for family in ("qwen2", "qwen3_moe"):
        learner = make_learner(
            write_model(tmp_path / family, family),
            dtype=getattr(torch, dtype),
            optimizer=OptimizerSettings(distributed=distributed),
        )
        planned = state_bytes(
            chunks_of(learner.arch, ParallelSettings(), 0),
            itemsize=2 if dtype == "bfloat16" else 4,
            distributed=distributed,
            data=1,
            expert_data=1,
        )
        assert measured_state(learner) == planned, family


def test_a_profiled_update_names_where_it_goes(tmp_path: Path) -> None:
    from hf_models import make_hf_model, save_hf_model
    from learner_parts import make_learner, share, with_old

    from pnpo_megatron.policy.optimizer import OptimizerSettings
    from pnpo_megatron.policy.process_groups import start_distributed
    from pnpo_megatron.profiling import step_table
    from pnpo_megatron.types import TrainSequence

    start_distributed()
    shape = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 4, "vocab_size": 151_936}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
    model = make_hf_model("qwen2", **shape, **heads, initializer_range=0.02).bfloat16()
    learner = make_learner(
        save_hf_model(model, tmp_path / "hf"),
        dtype=torch.bfloat16,
        max_tokens=16_384,
        optimizer=OptimizerSettings(lr=1e-6, warmup_steps=0),
        megatron={"bias_activation_fusion": True},
    )
    ids = torch.randint(0, 151_936, (16_384,))
    one = TrainSequence(ids, torch.arange(16_384) >= 1024, torch.zeros(16_384), 1.0)
    scored = with_old([one], learner.log_probs(share([one], "response")))
    batch = share(scored, "response")
    learner.update(batch, make_objective("pnpo"), step=1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as running:
        for name, run in (
            ("log_probs", lambda: learner.log_probs(batch)),
            ("update", lambda: learner.update(batch, make_objective("pnpo"), step=1)),
        ):
            with record_function(f"pnpo/{name}"):
                run()
                torch.cuda.synchronize()
    table = step_table(running.key_averages())
    if target := os.environ.get("GPU_CHECK_JSON"):
        Path(target).with_name("profile.txt").write_text(table, encoding="utf-8")
    assert table.index("log_probs") < table.index("update") < table.index("operation")
