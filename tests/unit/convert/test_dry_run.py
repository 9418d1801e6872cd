"""The plan of a conversion: from headers alone, with the numbers a person checks first."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hf_models import R1_DISTILL

from pnpo_megatron.convert.dry_run import check_space, describe
from pnpo_megatron.convert.families import hf_shapes, read_architecture
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.errors import ConversionError


def hollow_folder(folder: Path) -> Path:
    """R1-Distill-Qwen-1.5B by its header: 3.3 GiB of holes, which no disk has to hold."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(R1_DISTILL))
    header, offset = {}, 0
    for name, shape in hf_shapes(read_architecture(R1_DISTILL)).items():
        end = offset + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return folder


def test_a_full_size_plan_names_family_shapes_bytes_and_time(tmp_path, monkeypatch):
    source = HfFolder(hollow_folder(tmp_path / "hf"))
    monkeypatch.setattr(HfFolder, "tensor", None)  # headers only: reading a tensor would end in a TypeError
    source.check_complete()
    plan = describe(source.architecture, source.dtype(), tmp_path / "out")
    assert "qwen2: 28 layers, hidden 1536, 12 query and 2 key-value heads of 128" in plan
    assert "vocabulary 151936, untied, rope default with theta 10000" in plan
    assert "tensors     339, 1,777,088,000 parameters" in plan
    assert "        28  model.layers.*.self_attn.k_proj.weight [256, 1536]" in plan
    assert "bytes       3,389.5 MiB as bfloat16, largest tensor 445.1 MiB" in plan
    assert "time        about 24 s" in plan


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    arch = read_architecture(R1_DISTILL)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 2**30))
    with pytest.raises(ConversionError, match=r"out: 3\.3 GiB are to be written and 1\.0 GiB are free"):
        check_space(arch, torch.bfloat16, tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []
