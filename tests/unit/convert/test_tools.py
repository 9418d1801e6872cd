"""The converters as command lines: HF to Megatron and back byte for byte, and a verify that finds planted
faults."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hf_models import OTHER_FILES, make_hf_model, save_hf_model
from safetensors.torch import load_file, save_file

from pnpo_megatron.convert.hf_folder import HfFolder

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / "checkpoint_convert" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def convert(hf: Path, megatron: Path, *more: str) -> int:
    return tool("hf_to_megatron").main(["--hf", str(hf), "--out", str(megatron), *more])


def convert_back(megatron: Path, hf: Path, *more: str) -> int:
    return tool("megatron_to_hf").main(["--megatron", str(megatron), "--out", str(hf), *more])


def verify(hf: Path, megatron: Path) -> int:
    return tool("verify").main(["--hf", str(hf), "--megatron", str(megatron), "--tokens", "2000"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("llama", False), ("qwen3_moe", False)])
def test_h23_h25_h28_there_and_back_is_byte_equal(tmp_path, family, tied, dtype):
    model = make_hf_model(family, tie_word_embeddings=tied).to(getattr(torch, dtype))
    hf = save_hf_model(model, tmp_path / "hf", max_shard_size="60KB")
    assert convert(hf, tmp_path / "megatron") == 0
    assert convert_back(tmp_path / "megatron", tmp_path / "back") == 0
    source, back = HfFolder(hf), HfFolder(tmp_path / "back")
    assert back.names() == source.names()
    for name in source.names():
        assert back.tensor(name).dtype == getattr(torch, dtype)
        assert torch.equal(back.tensor(name), source.tensor(name)), name
    for name in [*OTHER_FILES, "config.json"]:
        assert (tmp_path / "back" / name).read_bytes() == (hf / name).read_bytes(), name


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("converted")
    hf = save_hf_model(make_hf_model("llama", num_key_value_heads=8, num_hidden_layers=2), base / "hf")
    assert convert(hf, base / "megatron") == 0
    return hf, base / "megatron"


def test_verify_accepts_what_is_the_same(converted, capsys):
    assert verify(*converted) == 0
    assert "tensors     0 differ" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["q and k", "gate and up", "rope base", "layers"])
def test_verify_catches_a_planted_fault(converted, tmp_path, capsys, fault):
    hf, megatron = converted
    bad = tmp_path / "bad"
    bad.mkdir()
    for path in hf.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    tensors = load_file(bad / "model.safetensors")

    def swap(left: str, right: str) -> None:
        tensors[left], tensors[right] = tensors[right], tensors[left]

    if fault == "q and k":
        swap("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight")
    elif fault == "gate and up":
        swap("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    elif fault == "layers":
        swap("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight")
    else:
        config = json.loads((bad / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 10000.0
        (bad / "config.json").write_text(json.dumps(config))
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    assert verify(bad, megatron) == 1
    assert ("0 differ" in capsys.readouterr().out) == (fault == "rope base")


def test_dry_run_reads_headers_and_writes_nothing(converted, tmp_path, capsys):
    hf, megatron = converted
    assert convert(hf, tmp_path / "out", "--dry-run", "--dtype", "bfloat16") == 0
    assert convert_back(megatron, tmp_path / "out", "--dry-run") == 0
    assert capsys.readouterr().out.count("llama: 2 layers") == 2
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_ends_with_2_and_one_line(converted, tmp_path, capsys):
    hf, megatron = converted
    assert convert(tmp_path / "nowhere", tmp_path / "out") == 2
    assert convert(hf, megatron) == 2
    assert convert_back(hf, tmp_path / "out") == 2
    assert verify(hf, tmp_path) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error"] * 4
    assert "nowhere is not a folder" in lines[0]
    assert "--overwrite" in lines[1]
    assert "is not a complete torch_dist checkpoint" in lines[2]
    assert list(tmp_path.iterdir()) == []
