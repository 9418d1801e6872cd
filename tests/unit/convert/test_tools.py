"""The converters as command lines: every family there and back byte for byte; wrong input in one line."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from converters import convert, convert_back, verify
from hf_models import CLASSES, OTHER_FILES, cast, make_hf_model, save_hf_model

from pnpo_megatron.convert.families import dtype_of
from pnpo_megatron.convert.hf_folder import HfFolder

GRID = list(product([False, True], ["float32", "bfloat16"], ["60KB", "1GB"]))
"""Tied, dtype, size of a source shard."""


def there_and_back(work: Path, family: str, tied: bool, dtype: str, shard: str) -> None:
    model = make_hf_model(family, tie_word_embeddings=tied, num_hidden_layers=2)
    hf = save_hf_model(cast(model, getattr(torch, dtype)), work / "hf", max_shard_size=shard)
    source = HfFolder(hf)
    assert (len(list(hf.glob("*.safetensors"))) > 1) == (shard == "60KB")
    assert convert(hf, work / "megatron") == 0
    assert convert_back(work / "megatron", work / "back") == 0
    back = HfFolder(work / "back")
    assert back.names() == source.names()
    assert ("lm_head.weight" in back.names()) != tied
    for name in source.names():
        assert source.tensor(name).unique().numel() > 1, name  # zeros and ones would hide a fault
        assert back.tensor(name).dtype == dtype_of(name, getattr(torch, dtype))
        assert torch.equal(back.tensor(name), source.tensor(name)), name
    for name in [*OTHER_FILES, "config.json"]:
        assert (work / "back" / name).read_bytes() == (hf / name).read_bytes(), name


@pytest.mark.parametrize(("family", "case"), [(family, GRID[5 * i % 8]) for i, family in enumerate(CLASSES)])
def test_h23_h25_h26_h27_h28_there_and_back_is_byte_equal(tmp_path, family, case):
    there_and_back(tmp_path, family, *case)


@pytest.mark.slow
@pytest.mark.parametrize("family", CLASSES)
def test_h23_h25_h26_h27_h28_there_and_back_is_byte_equal_in_every_form(tmp_path, family):
    for number, case in enumerate(GRID):
        there_and_back(tmp_path / str(number), family, *case)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("converted")
    hf = save_hf_model(make_hf_model("llama", num_key_value_heads=8, num_hidden_layers=2), base / "hf")
    assert convert(hf, base / "megatron") == 0
    return hf, base / "megatron"


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
