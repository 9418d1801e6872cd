"""Checkpoints written and read one tensor at a time: Megatron's own format; no damage is accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from converters import convert, convert_back
from hf_models import make_hf_model, save_hf_model
from torch import Tensor

from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.hf_writer import published_whole
from pnpo_megatron.convert.stream import load_hf_weights
from pnpo_megatron.errors import ConversionError
from pnpo_megatron.manifest import damage
from pnpo_megatron.policy.checkpoint import CheckpointSave, tensor_list
from pnpo_megatron.policy.conversion import Plan, hf_to_megatron, one_process
from pnpo_megatron.policy.model import build_model
from pnpo_megatron.policy.process_groups import ParallelSettings


def converted(base: Path, family: str, **shape: Any) -> tuple[HfFolder, Path]:
    hf = save_hf_model(make_hf_model(family, num_hidden_layers=2, **shape), base / "hf")
    assert convert(hf, base / "megatron") == 0
    return HfFolder(hf), base / "megatron"


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_the_written_checkpoint_is_what_megatron_itself_writes(tmp_path, family):
    from megatron.core.dist_checkpointing import load_plain_tensors  # after the CPU's patches

    source, streamed = converted(tmp_path, family)
    with one_process() as groups:
        chunks = build_model(source.architecture, ParallelSettings(), dtype=torch.float32)
        load_hf_weights(chunks, source, groups)
        CheckpointSave(tmp_path / "whole", chunks, None, groups).finish()
        ours, theirs = tensor_list(streamed), tensor_list(tmp_path / "whole")
        assert ours.state_dict_metadata == theirs.state_dict_metadata  # names, shapes, pieces, objects
        assert ours.storage_data.keys() == theirs.storage_data.keys()
        left, right = (load_plain_tensors(str(at)) for at in (streamed, tmp_path / "whole"))
    assert left.keys() - {"content_metadata"} == right.keys() - {"content_metadata"} and len(left) > 8
    assert all(torch.equal(value, right[key]) for key, value in left.items() if isinstance(value, Tensor))
    assert damage(streamed) == []


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def edit_architecture(folder: Path, **changes: Any) -> None:
    """A checkpoint that says, in both places, that it is of another model."""
    for path in (folder / "architecture.json", folder / "hf" / "config.json"):
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, **{key: v for key, v in changes.items() if key in values}}))


FAULTS: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda at: flip(at / "__0_0.distcp", (at / "__0_0.distcp").stat().st_size // 2),
    "cut short": lambda at: (at / "__0_0.distcp").write_bytes((at / "__0_0.distcp").read_bytes()[:-5000]),
    "no data": lambda at: (at / "__0_0.distcp").unlink(),
    "no index": lambda at: (at / ".metadata").unlink(),
    "a broken index": lambda at: (at / ".metadata").write_bytes((at / ".metadata").read_bytes()[:-40]),
    "a layer more than it says": lambda at: edit_architecture(at, layers=1, num_hidden_layers=1),
    "a layer less than it says": lambda at: edit_architecture(at, layers=3, num_hidden_layers=3),
    "two files that disagree": lambda at: edit_architecture(at, layers=1),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("whole"), "qwen2")[1]


@pytest.mark.parametrize("fault", FAULTS)
def test_h27_a_damaged_checkpoint_is_refused_in_one_line_and_nothing_is_left(whole, tmp_path, fault, capsys):
    bad = tmp_path / "bad"
    shutil.copytree(whole, bad)
    FAULTS[fault](bad)
    assert convert_back(bad, tmp_path / "back") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "bad" in line
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_a_damaged_source_stops_the_writer_and_nothing_is_left(tmp_path, capsys):
    folder = save_hf_model(make_hf_model("llama", num_hidden_layers=2), tmp_path / "hf")
    HfFolder(folder).check_complete()
    tensors = HfFolder(folder)
    broken = tensors.tensor

    def tensor(name: str) -> Tensor:
        if name == "model.layers.1.mlp.up_proj.weight":
            raise ConversionError("the disk is gone")
        return broken(name)

    object.__setattr__(tensors, "tensor", tensor)
    with pytest.raises(ConversionError, match="the disk is gone"):  # not torch's wrapper of it
        hf_to_megatron(Plan(tensors, tmp_path / "out", torch.float32))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    target = tmp_path / "out"
    with published_whole(target) as living:
        (living / "file").write_text("1")
        left = tmp_path / ".out.partial-1"
        left.mkdir()
        (left / "file").write_text("0")
        living.rename(moved := tmp_path / ".out.partial-2")  # as if of another process
        with published_whole(target) as second:
            (second / "file").write_text("2")
        assert not left.exists() and (moved / "file").read_text() == "1"
        moved.rename(living)
        shutil.rmtree(target)
    assert (target / "file").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
