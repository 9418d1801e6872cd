"""One model under every split of two ranks: the same exported tensors, the same loss, the same weights after
updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_hf_model, save_hf_model
from tiny_run import TinyRun
from torch import Tensor

from pnpo_megatron.convert.hf_folder import HfFolder

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence": True},
    "PP2": {"pipeline": 2},
    "PP2xVPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "DP2": {},
}


def trained(folder: Path, sizes: dict[str, Any], updates: int, **optimizer: Any) -> dict[str, Any]:
    run = TinyRun(folder, sizes, **optimizer)
    before = run.export()
    for number in range(updates):
        run.update(number)
    return {"before": before, "after": run.export(), "table": tied_table(run)}


def tied_table(run: TinyRun) -> Tensor | None:
    """This rank's copy of a tied table, of the first stage or of the last."""
    from pnpo_megatron.convert.stream import local_parameters, tied_copy

    copy = tied_copy(run.chunks, run.arch)
    own = local_parameters(run.chunks, run.arch, run.groups).get("embedding.word_embeddings.weight")
    table = own if copy is None else copy
    return None if table is None else table.detach().clone()


def every_layout(folder: str) -> dict[str, dict[str, Any]]:
    return {name: trained(Path(folder), sizes, 2) for name, sizes in LAYOUTS.items()}


def one_rank(folder: str) -> dict[str, Any]:
    return trained(Path(folder), {}, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_h21_h25_every_split_exports_the_source_and_learns_the_same(spawn, tmp_path, tied):
    model = make_hf_model("qwen2", tie_word_embeddings=tied)
    folder = save_hf_model(model, tmp_path / "hf")
    source = {
        name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")
    }
    (reference,) = spawn(one_rank, 1, str(folder))
    assert not torch.equal(reference["after"]["model.norm.weight"], source["model.norm.weight"])
    for rank, layouts in enumerate(spawn(every_layout, 2, str(folder), timeout_s=120)):
        for name, run in layouts.items():
            assert list(run["before"]) == list(reference["before"]), (name, rank)
            for tensor, value in source.items():
                assert torch.equal(run["before"][tensor], value), (name, rank, tensor)
            for tensor, value in reference["after"].items():
                gap = float((run["after"][tensor] - value).abs().max())
                assert gap <= 2e-6, (name, tensor, gap)


def tied_over_four(folder: str) -> dict[str, Any]:
    return trained(Path(folder), {"pipeline": 2}, 3, overlap_grad_reduce=True, overlap_param_gather=True)


def tied_alone(folder: str) -> dict[str, Any]:
    return trained(Path(folder), {}, 3)


def test_h21_every_copy_of_a_tied_table_stays_the_same_under_data_and_pipeline_parallelism(spawn, tmp_path):
    model = make_hf_model("qwen2", tie_word_embeddings=True, num_hidden_layers=2)
    folder = save_hf_model(model, tmp_path / "hf")
    (reference,) = spawn(tied_alone, 1, str(folder))
    runs = spawn(tied_over_four, 4, str(folder), timeout_s=120)
    for run in runs:
        assert torch.equal(run["table"], runs[0]["table"])
        for tensor, value in reference["after"].items():
            assert float((run["after"][tensor] - value).abs().max()) <= 2e-6, tensor


EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"expert": 2},
    "TP2+SP": {"tensor": 2, "sequence": True},
    "TP2+SPxEP2": {"tensor": 2, "sequence": True, "expert": 2},
    "PP2": {"pipeline": 2},
}


def every_expert_layout(folder: str) -> dict[str, dict[str, Any]]:
    return {name: trained(Path(folder), sizes, 2) for name, sizes in EXPERT_LAYOUTS.items()}


def test_h27_experts_are_exported_whole_and_learn_the_same_under_every_split(spawn, tmp_path):
    model = make_hf_model("qwen3_moe", num_hidden_layers=2)
    folder = save_hf_model(model, tmp_path / "hf")
    (reference,) = spawn(one_rank, 1, str(folder))
    source = HfFolder(folder)
    assert sorted(reference["before"]) == source.names()
    for rank, layouts in enumerate(spawn(every_expert_layout, 2, str(folder), timeout_s=120)):
        for name, run in layouts.items():
            for tensor, value in reference["after"].items():
                assert torch.equal(run["before"][tensor], source.tensor(tensor)), (name, rank, tensor)
                gap = float((run["after"][tensor] - value).abs().max())
                assert gap <= 2e-6, (name, tensor, gap)


LATENT_LAYOUTS: dict[str, dict[str, Any]] = {"EP2": {"expert": 2}, "PP2": {"pipeline": 2}, "DP2": {}}


def every_latent_layout(folder: str) -> dict[str, dict[str, Any]]:
    return {name: trained(Path(folder), sizes, 2) for name, sizes in LATENT_LAYOUTS.items()}


@pytest.mark.slow
def test_latent_attention_learns_the_same_under_every_split_and_leaves_the_correction_alone(spawn, tmp_path):
    folder = save_hf_model(make_hf_model("deepseek_v3", num_hidden_layers=3), tmp_path / "hf")
    (reference,) = spawn(one_rank, 1, str(folder), timeout_s=300)
    for layouts in spawn(every_latent_layout, 2, str(folder), timeout_s=600):
        for name, run in layouts.items():
            for tensor, value in reference["after"].items():
                kept = tensor.endswith("e_score_correction_bias")
                assert torch.equal(run["before"][tensor], value) == kept, (name, tensor)
                gap = float((run["after"][tensor] - value).abs().max())
                assert gap <= 2e-6, (name, tensor, gap)
