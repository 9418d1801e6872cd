"""verify.py against an honest conversion and against planted faults, through tensors and logits alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from converters import convert, verify
from hf_models import make_hf_model, save_hf_model
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two query heads a key-value head would give q and k other shapes: here they can be swapped."""
    model = make_hf_model("llama", num_key_value_heads=8, num_hidden_layers=3)
    return save_hf_model(model, tmp_path_factory.mktemp("dense") / "hf")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_hf_model("qwen3_moe", num_hidden_layers=2)
    return save_hf_model(model, tmp_path_factory.mktemp("moe") / "hf")


def swap(tensors: Tensors, left: str, right: str) -> None:
    """Exchange every tensor with ``left`` in its name and its partner with ``right``."""
    for name in [name for name in tensors if left in name]:
        other = name.replace(left, right)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def layer_off_by_one(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name] = tensors[name.replace(".layers.1.", ".layers.2.")].clone()


def nothing(tensors: Tensors) -> None:
    """Only the config is wrong."""


FAULTS: dict[str, Callable[[Tensors], None]] = {
    "q and k swapped in one layer": lambda t: swap(t, "layers.1.self_attn.q_", "layers.1.self_attn.k_"),
    "gate and up swapped": lambda t: swap(t, "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
    "layers swapped": lambda t: swap(t, ".layers.0.", ".layers.1."),
    "a layer off by one": layer_off_by_one,
    "rope base off": nothing,
}


def wrongly_converted(hf: Path, work: Path, fault: Callable[[Tensors], None]) -> Path:
    """The checkpoint that a converter with this fault would write."""
    bad = work / "bad"
    bad.mkdir()
    for path in hf.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    tensors = load_file(bad / "model.safetensors")
    fault(tensors)
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    if fault is nothing:
        config = json.loads((bad / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 10000.0
        (bad / "config.json").write_text(json.dumps(config))
    assert convert(bad, work / "megatron") == 0
    return work / "megatron"


def printed(text: str) -> dict[str, float]:
    """The numbers of the last three lines."""
    return {
        "tensors": float(re.findall(r"^tensors +(\S+) differ", text, re.M)[0]),
        "logits": float(re.findall(r"^logits +differ by up to (\S+) over", text, re.M)[0]),
        "log-probs": float(re.findall(r"^log-probs +differ by up to (\S+),", text, re.M)[0]),
    }


@pytest.mark.parametrize("family", ["dense", "experts"])
def test_an_honest_conversion_is_within_the_bound_over_2000_tokens(family, request, tmp_path, capsys):
    hf = request.getfixturevalue(family)
    assert convert(hf, tmp_path / "megatron") == 0
    assert verify(hf, tmp_path / "megatron") == 0
    text = capsys.readouterr().out
    bound = 1e-5 if family == "dense" else 1e-4
    assert f"over 2000 tokens (bound {bound:g})" in text
    numbers = printed(text)
    assert numbers["tensors"] == 0 and max(numbers["logits"], numbers["log-probs"]) <= bound


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_by_the_tensors_and_by_the_logits(fault, dense, tmp_path, capsys):
    megatron = wrongly_converted(dense, tmp_path, FAULTS[fault])
    capsys.readouterr()
    assert verify(dense, megatron, "--tokens", "300") == 1
    numbers = printed(capsys.readouterr().out)
    assert (numbers["tensors"] == 0) == (fault == "rope base off")
    assert min(numbers["logits"], numbers["log-probs"]) > 1e-2


def test_one_permuted_expert_is_caught(experts, tmp_path, capsys):
    megatron = wrongly_converted(experts, tmp_path, lambda t: swap(t, "1.mlp.experts.0.", "1.mlp.experts.2."))
    capsys.readouterr()
    assert verify(experts, megatron, "--tokens", "300") == 1
    text = capsys.readouterr().out
    assert printed(text)["tensors"] == 6 and printed(text)["logits"] > 1e-2
    assert "model.layers.1.mlp.experts.0.gate_proj.weight differs by up to" in text


def test_a_nan_on_one_side_is_no_agreement(dense, tmp_path, capsys):
    def poison(tensors: Tensors) -> None:
        tensors["model.norm.weight"][3] = torch.nan

    megatron = wrongly_converted(dense, tmp_path, poison)
    capsys.readouterr()
    assert verify(dense, megatron, "--tokens", "300") == 1
    assert "logits      differ by up to nan" in capsys.readouterr().out
