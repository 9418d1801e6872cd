"""Two hundred damaged model folders: each is refused in words, or (NaN) kept with a warning."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import make_hf_model, save_hf_model
from safetensors.torch import load_file, save_file

from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.hf_headers import INDEX, Stored, read_header
from pnpo_megatron.errors import ConversionError


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def pick(folder: Path, draw: random.Random) -> Path:
    return draw.choice(shards(folder))


def truncate(folder: Path, draw: random.Random) -> None:
    path = pick(folder, draw)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def truncate_header(folder: Path, draw: random.Random) -> None:
    path = pick(folder, draw)
    path.write_bytes(path.read_bytes()[: draw.randrange(header_end(path))])


def header_end(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def flip_header_bit(folder: Path, draw: random.Random) -> None:
    path = pick(folder, draw)
    content = bytearray(path.read_bytes())
    content[draw.randrange(header_end(path))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def lose_shard(folder: Path, draw: random.Random) -> None:
    pick(folder, draw).unlink()


def lose_shard_and_its_index_entries(folder: Path, draw: random.Random) -> None:
    path = pick(folder, draw)
    lost = load_file(path).keys()
    path.unlink()
    edit_index(folder, lambda weights: [weights.pop(name) for name in lost])


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def wrong_index(folder: Path, draw: random.Random) -> None:
    def change(weights: dict[str, str]) -> None:
        name = draw.choice(sorted(weights))
        file = draw.choice([file.name for file in shards(folder) if file.name != weights[name]])
        draw.choice([lambda: weights.pop(name), lambda: weights.update({name: file})])()

    edit_index(folder, change)


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def extra_tensor(folder: Path, draw: random.Random) -> None:
    path = pick(folder, draw)
    name = draw.choice(["model.layers.7.mlp.up_proj.weight", "model.visual.proj", "self_attn.sinks", "x"])
    edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(3)}))
    edit_index(folder, lambda weights: weights.update({name: path.name}))


def wrong_shape(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = draw.choice(sorted(tensors))
        old = tensors[name]
        tensors[name] = draw.choice([old[:-1].contiguous(), old[None], torch.cat((old, old))])

    edit_tensors(pick(folder, draw), change)


def name_in_two_files(folder: Path, draw: random.Random) -> None:
    source, target = draw.sample(shards(folder), 2)
    name = draw.choice(sorted(load_file(source)))
    edit_tensors(target, lambda tensors: tensors.update({name: load_file(source)[name]}))


def name_twice_in_a_header(folder: Path, draw: random.Random) -> None:
    path = pick(folder, draw)
    content, end = path.read_bytes(), header_end(path)
    header = json.loads(content[8:end])
    name = draw.choice([name for name in header if name != "__metadata__"])
    text = content[8:end].rstrip()[:-1] + f",{json.dumps(name)}:{json.dumps(header[name])}}}".encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def whole_numbers(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = draw.choice(sorted(tensors))
        tensors[name] = tensors[name].to(draw.choice([torch.int8, torch.float8_e4m3fn, torch.int32]))

    edit_tensors(pick(folder, draw), change)


def not_a_number(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        flat = tensors[draw.choice(sorted(tensors))].view(-1)
        flat[draw.randrange(len(flat))] = draw.choice([torch.nan, torch.inf])

    edit_tensors(pick(folder, draw), change)


FAULTS = [
    truncate,
    truncate_header,
    flip_header_bit,
    flip_header_bit,
    flip_header_bit,
    lose_shard,
    lose_shard_and_its_index_entries,
    wrong_index,
    extra_tensor,
    wrong_shape,
    name_in_two_files,
    name_twice_in_a_header,
    whole_numbers,
    not_a_number,
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_hf_model("qwen2", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    return save_hf_model(model, tmp_path_factory.mktemp("sound") / "hf", max_shard_size="8KB")


def read_whole(folder: Path) -> HfFolder:
    source = HfFolder(folder)
    source.check_complete()
    source.dtype()
    for name in source.names():
        source.tensor(name)
    return source


def test_h27_no_damaged_folder_is_accepted_in_silence_and_none_ends_in_a_traceback(sound, tmp_path, caplog):
    read_whole(sound)
    assert not caplog.records
    for seed in range(200):
        fault, draw = FAULTS[seed % len(FAULTS)], random.Random(seed)
        folder = Path(shutil.copytree(sound, tmp_path / "hf"))
        fault(folder, draw)
        caplog.clear()
        try:
            read_whole(folder)
        except ConversionError as error:
            assert str(folder) in str(error), (seed, fault.__name__)  # says where
            assert fault is not not_a_number
        else:
            assert fault is not_a_number, (seed, fault.__name__)
            assert [record.levelno for record in caplog.records] == [logging.WARNING], seed
            assert "holds NaN or infinity, which is kept" in caplog.text
        shutil.rmtree(folder)


def test_headers_are_those_of_the_safetensors_library(sound):
    for path in shards(sound):
        tensors = load_file(path)
        assert read_header(path).keys() == tensors.keys()
        for name, stored in read_header(path).items():
            assert stored == Stored(path.name, "F32", tuple(tensors[name].shape), tensors[name].nbytes)


def test_a_stale_file_beside_an_index_is_refused(sound, tmp_path):
    folder = Path(shutil.copytree(sound, tmp_path / "hf"))
    shutil.copyfile(shards(folder)[0], folder / "model.safetensors")
    with pytest.raises(ConversionError, match=r"both model\.safetensors and .*remove the stale one"):
        _ = HfFolder(folder).headers
