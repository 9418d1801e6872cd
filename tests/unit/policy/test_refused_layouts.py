"""Layouts that cannot be trained, or that Megatron would compute wrongly, are refused with the way out."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_hf_model, save_hf_model

from pnpo_megatron.config import load_config
from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.errors import ConfigError, ConversionError
from pnpo_megatron.inputs import experts_settings
from pnpo_megatron.parallel.settings import check_layout
from pnpo_megatron.policy.megatron_config import transformer_config
from pnpo_megatron.policy.process_groups import ParallelSettings

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts cut by TP": ("mixtral", {"tensor": 2}, r"parallel\.tensor = 2 with experts.*sequence = true"),
    "experts that do not divide": ("mixtral", {"expert": 3}, r"expert = 3 does not divide the model's 4"),
    "experts of a dense model": (
        "qwen2",
        {"expert": 2},
        r"expert = 2: qwen2 has no experts; use 1",
    ),
    "stages without layers": (
        "qwen2",
        {"pipeline": 4, "virtual_pipeline": 2},
        r"8 stages for 4 layers; use at most 4",
    ),
    "uneven heads": (
        "qwen2",
        {"tensor": 3},
        r"tensor = 3 does not divide 8 query heads.*use 1, 2, 4",
    ),
}


@pytest.fixture(scope="module")
def architectures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Architecture]:
    folder = tmp_path_factory.mktemp("models")
    return {
        family: HfFolder(save_hf_model(make_hf_model(family), folder / family)).architecture
        for family in ("qwen2", "mixtral")
    }


@pytest.mark.parametrize("case", REFUSED)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    architectures: dict[str, Architecture], case: str
) -> None:
    family, sizes, message = REFUSED[case]
    for check in (check_layout, lambda arch, sizes: transformer_config(arch, sizes, dtype=torch.float32)):
        with pytest.raises((ConfigError, ConversionError), match=message):
            check(architectures[family], ParallelSettings(**sizes))


def test_experts_under_sequence_parallelism_are_accepted(architectures: dict[str, Architecture]) -> None:
    for expert in (1, 2, 4):
        check_layout(architectures["mixtral"], ParallelSettings(tensor=2, sequence=True, expert=expert))


@pytest.mark.parametrize("pipeline", [2, 4])
def test_no_setting_leads_to_virtual_stages_without_overlapped_messages(
    architectures: dict[str, Architecture], pipeline: int
) -> None:
    """On two ranks Megatron-Core 0.16 would mix up their messages without a word."""
    parallel = ParallelSettings(pipeline=pipeline, virtual_pipeline=4 // pipeline)
    for recompute in ("none", "selective", "full"):
        config = transformer_config(
            architectures["qwen2"], parallel, dtype=torch.float32, recompute=recompute
        )
        assert config.overlap_p2p_comm == (parallel.virtual_pipeline > 1)
        assert config.batch_p2p_comm != config.overlap_p2p_comm


def test_virtual_stages_of_two_ranks_without_overlapped_messages_are_refused(
    architectures: dict[str, Architecture],
) -> None:
    parallel = ParallelSettings(pipeline=2, virtual_pipeline=2)
    plain = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    with pytest.raises(ConfigError, match=r"pipeline = 2 with virtual_pipeline = 2.*overlap_p2p_comm = True"):
        transformer_config(architectures["qwen2"], parallel, dtype=torch.float32, **plain)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
def test_norms_are_run_again_only_with_transformer_engine(architectures: dict[str, Architecture]) -> None:
    """Megatron would end in a NameError at the first forward pass."""
    fields = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}
    with pytest.raises(ConfigError, match=r"recompute_modules has \"layernorm\".*leave it out"):
        transformer_config(architectures["qwen2"], ParallelSettings(), dtype=torch.float32, **fields)


SETTINGS = [
    ("qwen2", "model.grouped_experts=true", r"grouped_experts = True: qwen2 has no experts; leave it out"),
    ("qwen2", "model.moe_bias_rate=0.1", r"moe_bias_rate = 0\.1: qwen2 has no experts"),
    ("qwen2", "model.router_replay=true", r"router_replay = True: qwen2 has no experts"),
    (
        "mixtral",
        "model.moe_bias_rate=0.1",
        r"router of mixtral has no bias of experts; use model\.moe_aux_loss",
    ),
    (
        "mixtral",
        "model.router_replay=rollout",
        r'router_replay = "rollout": without a CUDA device .*use true',
    ),
]


@pytest.mark.parametrize(("family", "flag", "message"), SETTINGS)
def test_settings_of_experts_that_a_model_cannot_have_are_refused(
    architectures: dict[str, Architecture], tmp_path: Path, family: str, flag: str, message: str
) -> None:
    (tmp_path / "config.toml").write_text('[model]\nhf = "none"\n[data]\nprompts = "none.jsonl"\n')
    with pytest.raises(ConfigError, match=message):
        experts_settings(load_config(tmp_path / "config.toml", [f"--{flag}"]), architectures[family])


def test_routes_are_replayed_only_where_every_pass_can_have_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\nhf = "none"\n[data]\nprompts = "none.jsonl"\n')
    moe = ["--model.recompute=selective", '--model.recompute_modules=["moe"]', "--model.router_replay=true"]
    load_config(tmp_path / "config.toml", moe)
    with pytest.raises(ConfigError, match=r"recompute_modules = \['moe'\] with model\.router_replay"):
        load_config(tmp_path / "config.toml", [*moe, "--parallel.pipeline=2"])
    flags = ["--checkpoint.within_batch=2", "--model.router_replay=rollout"]
    assert load_config(tmp_path / "config.toml", flags).model.router_replay == "rollout"
    with pytest.raises(ConfigError, match=r"within_batch = 2 with model\.router_replay"):
        load_config(tmp_path / "config.toml", [flags[0], "--model.router_replay=true"])
