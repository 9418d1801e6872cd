"""Quantised export: refused in words where it cannot work; where it does, every weight within its format's
step."""

from __future__ import annotations

import importlib.util
import json
import string
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from converters import convert, convert_back
from hf_models import make_hf_model, save_hf_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pnpo_megatron.convert import quantise
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.errors import ConversionError

needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None,
    reason="nvidia-modelopt is not installed (requirements/convert.txt)",
)


def folder_with_tokenizer(family: str, folder: Path) -> Path:
    save_hf_model(make_hf_model(family, num_hidden_layers=2, moe_intermediate_size=32), folder)
    vocabulary = {symbol: index for index, symbol in enumerate(["<unk>", *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "README.md").write_text("the source's own card")
    return folder


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": str(i), "problem": f"What is {i} + {3 * i}? " * 4, "answer": str(4 * i)} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("int8", True, r"--quantize int8: vLLM does not read modelopt's int8 folders; use fp8 or nvfp4"),
        ("fp4", True, r"--quantize fp4: use fp8 or nvfp4"),
        ("fp8", False, r"--quantize fp8 needs --calibration FILE\.jsonl"),
        ("nvfp4", True, r"mlp\.down_proj\.weight is \[64, 72\], and rows must be a multiple of 16; use fp8"),
    ],
)
def test_what_cannot_be_quantised_is_refused_in_words(tmp_path, calibration, kind, given, message):
    source = HfFolder(save_hf_model(make_hf_model("qwen2", intermediate_size=72), tmp_path / "hf"))
    with pytest.raises(ConversionError, match=message):
        quantise.plan_quantisation(kind, calibration if given else None, source)


def test_without_modelopt_the_way_to_install_it_is_named(tmp_path, calibration, monkeypatch):
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(quantise, "version", absent)
    source = HfFolder(save_hf_model(make_hf_model("qwen2"), tmp_path / "hf"))
    with pytest.raises(ConversionError, match=r"nvidia-modelopt: pip install -r requirements/convert\.txt"):
        quantise.plan_quantisation("fp8", calibration, source)


def from_fp8(weights: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """The weight, and half the distance of its neighbours: e4m3 keeps 3 bits, and 2^-9 below 2^-6."""
    codes, scale = weights[name].float(), weights[f"{name}_scale"]
    step = torch.maximum(codes.abs().log2().floor(), torch.tensor(-6.0)).exp2() / 8
    return codes * scale, step / 2 * scale


def from_nvfp4(weights: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Two codes a byte, the low half first: 1 sign bit, then the index of a magnitude."""
    packed, scale = weights[name], weights[f"{name}_scale"].float() * weights[f"{name}_scale_2"]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    half_gaps = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0])
    scale = scale.repeat_interleave(16, dim=1)
    return magnitudes[codes & 7] * (1 - 2 * (codes >> 3)) * scale, half_gaps[codes & 7] * scale


@needs_modelopt
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_every_weight_is_within_its_format_s_step_and_the_card_says_how(tmp_path, calibration, family):
    hf = folder_with_tokenizer(family, tmp_path / "hf")
    assert convert(hf, tmp_path / "megatron") == 0
    source = HfFolder(hf)
    for kind, decode in (("fp8", from_fp8), ("nvfp4", from_nvfp4)):
        out, options = tmp_path / kind, ["--quantize", kind, "--calibration", str(calibration)]
        assert convert_back(tmp_path / "megatron", out, *options) == 0
        weights = load_file(out / "model.safetensors")
        quantised = [name for name in source.names() if name + "_scale" in weights]
        assert len(quantised) == 2 * (4 + 3 * (4 if family == "qwen3_moe" else 1))
        for name in source.names():
            plain = source.tensor(name).bfloat16()
            if name in quantised:
                value, half_step = decode(weights, name)
                # modelopt divides by the scale in bfloat16: that rounding, up to 2^-8, adds to 2^-4.
                assert ((value - plain.float()).abs() <= 1.0626 * half_step).all(), name
                assert weights[name.removesuffix("weight") + "input_scale"] > 0
            else:
                assert torch.equal(weights[name], plain), name
        check_folder(out, hf, kind, calibration)


def check_folder(out: Path, hf: Path, kind: str, calibration: Path) -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptNvFp4Config

    config = json.loads((out / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == json.loads((hf / "config.json").read_text()) | {"dtype": "bfloat16"}
    reader = ModelOptFp8Config if kind == "fp8" else ModelOptNvFp4Config
    for written in (settings, json.loads((out / "hf_quant_config.json").read_text())):
        read = reader.from_config(written)
        assert "lm_head" in read.exclude_modules
        assert not read.is_layer_excluded("model.layers.1.self_attn.q_proj")
    for name in ("tokenizer.json", "generation_config.json", "LICENSE"):
        assert (out / name).read_bytes() == (hf / name).read_bytes()
    card = (out / "README.md").read_text()
    assert f"quantised to {kind}" in card and "8 prompts" in card and calibration.name in card
    assert (out / "README.source.md").read_text() == "the source's own card"
    assert sorted(path.name for path in out.parent.iterdir() if path.name.startswith(".")) == []
