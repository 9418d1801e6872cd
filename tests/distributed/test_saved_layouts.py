"""What a learner saves under any layout, with its optimizer beside, converts back byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from converters import convert, convert_back
from hf_models import make_hf_model, save_hf_model
from tiny_run import TinyRun

from pnpo_megatron.convert.hf_folder import HfFolder

DENSE: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor": 2, "sequence": True},
    "PP2xVPP2, uneven": {"pipeline": 2, "virtual_pipeline": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "EP2": {"expert": 2},
    "TP2+SP+EP2": {"tensor": 2, "sequence": True, "expert": 2},
}
FOUR: dict[str, dict[str, Any]] = {
    "TP4": {"tensor": 4},
    "TP2xPP2": {"tensor": 2, "pipeline": 2, "sequence": True},
}


def load_and_save(folder: str, base: str, layouts: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Per layout: tensors that are not the source's after a load. Saves each with an optimizer, untrained."""
    from pnpo_megatron.policy.checkpoint import CheckpointSave, load_checkpoint

    source, wrong = HfFolder(Path(folder)), {}
    for name, sizes in layouts.items():
        run = TinyRun(Path(folder), sizes, load=False, dtype=torch.bfloat16, distributed=True)
        load_checkpoint(Path(base) / "converted", run.chunks, None, run.groups)
        exported = run.export()
        wrong[name] = [tensor for tensor, value in exported.items() if not same(value, source, tensor)]
        assert sorted(exported) == source.names()
        at = Path(base) / name
        CheckpointSave(at, run.chunks, run.optimizer, run.groups, source=run.source).finish()
    return wrong


def same(value: torch.Tensor, source: HfFolder, tensor: str) -> bool:
    return value.dtype == torch.bfloat16 and torch.equal(value, source.tensor(tensor))


def there_and_back(
    spawn: Any, base: Path, family: str, ranks: int, layouts: dict[str, dict[str, Any]], **shape: Any
) -> None:
    model = make_hf_model(family, **shape).to(torch.bfloat16)
    hf = save_hf_model(model, base / "hf", max_shard_size="60KB")
    assert convert(hf, base / "converted") == 0
    for wrong in spawn(load_and_save, ranks, str(hf), str(base), layouts, timeout_s=120):
        assert wrong == {name: [] for name in layouts}
    source = HfFolder(hf)
    for name in layouts:
        assert convert_back(base / name, base / f"{name} back") == 0
        back = HfFolder(base / f"{name} back")
        assert back.names() == source.names()
        assert [tensor for tensor in back.names() if not same(back.tensor(tensor), source, tensor)] == []


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_h23_h24_h25_a_dense_model_saved_under_every_layout_converts_back(spawn, tmp_path, tied):
    there_and_back(spawn, tmp_path, "qwen2", 2, DENSE, tie_word_embeddings=tied, num_hidden_layers=5)


def test_h27_experts_saved_under_every_layout_convert_back(spawn, tmp_path):
    there_and_back(spawn, tmp_path, "qwen3_moe", 2, EXPERTS, num_hidden_layers=2)


@pytest.mark.slow
def test_h23_four_ranks_load_and_convert_back(spawn, tmp_path):
    there_and_back(spawn, tmp_path, "qwen2", 4, FOUR, num_hidden_layers=3)
