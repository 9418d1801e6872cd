"""Reading and writing model folders: complete, loud, and published whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_models import OTHER_FILES, make_hf_model, save_hf_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.hf_headers import INDEX
from pnpo_megatron.convert.hf_writer import write_hf_folder
from pnpo_megatron.errors import ConversionError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four layers in several files."""
    return save_hf_model(make_hf_model("qwen2"), tmp_path / "hf", max_shard_size="60KB")


def stream(source: HfFolder):
    return ((name, source.tensor(name)) for name in source.names())


@pytest.mark.parametrize("max_shard_bytes", [60_000, 2**30])
@pytest.mark.parametrize("tied", [False, True])
def test_h25_h27_h28_a_written_folder_equals_its_source_and_loads_in_transformers(
    tmp_path, max_shard_bytes, tied
):
    model = make_hf_model("qwen2", tie_word_embeddings=tied)
    source = HfFolder(save_hf_model(model, tmp_path / "hf", max_shard_size="60KB"))
    out = tmp_path / "out"
    write_hf_folder(out, source, stream(source), max_shard_bytes=max_shard_bytes)
    written = HfFolder(out)
    written.check_complete()
    assert written.names() == source.names()
    assert all(torch.equal(written.tensor(name), source.tensor(name)) for name in source.names())
    assert (out / INDEX).exists() == (max_shard_bytes == 60_000)
    for name in [*OTHER_FILES, "config.json"]:
        assert (out / name).read_bytes() == (source.path / name).read_bytes(), name
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


def test_the_index_counts_every_byte_and_names_every_tensor(folder, tmp_path):
    source = HfFolder(folder)
    write_hf_folder(tmp_path / "out", source, stream(source), max_shard_bytes=60_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(source.tensor(name).nbytes for name in source.names())
    for file in set(index["weight_map"].values()):
        claimed = {name for name, home in index["weight_map"].items() if home == file}
        assert set(load_file(tmp_path / "out" / file)) == claimed  # read by safetensors' own reader


def test_a_change_of_dtype_is_the_only_change_in_config(folder, tmp_path):
    source = HfFolder(folder)
    write_hf_folder(tmp_path / "out", source, stream(source), dtype=torch.bfloat16)
    before, after = source.config, json.loads((tmp_path / "out" / "config.json").read_text())
    assert after.pop("dtype") == "bfloat16"
    assert {key: value for key, value in before.items() if key != "dtype"} == after
    assert HfFolder(tmp_path / "out").tensor("model.norm.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "twice"])
def test_h27_a_stream_that_is_not_the_whole_model_writes_nothing(folder, tmp_path, fault):
    source = HfFolder(folder)
    tensors = dict(stream(source))
    if fault == "missing":
        del tensors["model.norm.weight"]
    elif fault == "extra":
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
    elif fault == "shape":
        tensors["model.norm.weight"] = torch.zeros(65)
    items = list(tensors.items()) + (list(tensors.items())[:1] if fault == "twice" else [])
    with pytest.raises(ConversionError):
        write_hf_folder(tmp_path / "out", source, iter(items))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_an_existing_target_survives_unless_overwrite_is_asked_for(folder, tmp_path):
    source, out = HfFolder(folder), tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(ConversionError, match="exists already; choose another folder or pass --overwrite"):
        write_hf_folder(out, source, stream(source))
    assert (out / "precious").read_text() == "x"
    write_hf_folder(out, source, stream(source), overwrite=True)
    assert not (out / "precious").exists()


def test_missing_folder_and_config_are_named(tmp_path):
    with pytest.raises(ConversionError, match="nowhere is not a folder"):
        HfFolder(tmp_path / "nowhere")
    with pytest.raises(ConversionError, match=r"config\.json is missing"):
        _ = HfFolder(tmp_path).architecture


def rewrite(folder: Path, change) -> None:
    """Edit the tensors of a one-file folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"),
            r"layers\.1\.self_attn\.k_proj\.bias is not in",
        ),
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight is not in"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(63)}),
            r"norm\.weight is \[63\].*calls for \[64\]",
        ),
        (
            lambda t: t.update({"model.visual.weight": torch.zeros(3)}),
            r"1 tensors .* first model\.visual\.weight",
        ),
    ],
)
def test_h27_folder_and_config_that_disagree_are_refused(tmp_path, change, message):
    folder = save_hf_model(make_hf_model("qwen2"), tmp_path / "hf")
    rewrite(folder, change)
    with pytest.raises(ConversionError, match=message):
        HfFolder(folder).check_complete()


@pytest.mark.parametrize(
    ("tied", "message"),
    [(False, "tie_word_embeddings = true allows no lm_head"), (True, r"lm_head\.weight is not in")],
)
def test_h25_a_flag_flipped_in_the_config_alone_is_refused(tmp_path, tied, message):
    folder = save_hf_model(make_hf_model("qwen2", tie_word_embeddings=tied), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": not tied}))
    with pytest.raises(ConversionError, match=message):
        HfFolder(folder).check_complete()


@pytest.mark.parametrize("fault", ["truncated", "missing", "header", "index"])
def test_damaged_files_are_named_not_read(folder, fault):
    first = sorted(folder.glob("*.safetensors"))[0]
    if fault == "truncated":
        first.write_bytes(first.read_bytes()[:-8])
    elif fault == "missing":
        first.unlink()
    elif fault == "header":
        first.write_bytes(b"\xff" * 8 + first.read_bytes()[8:])
    else:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = first.name
        (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=r"(damaged|missing|disagree)"):
        HfFolder(folder).check_complete()


def test_an_index_that_points_outside_its_folder_is_refused(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConversionError, match="is not a file name in that folder"):
        HfFolder(folder).check_complete()
