"""A converter killed at any moment leaves nothing under its target's name, or a whole folder."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from converters import convert, convert_back
from hf_models import make_hf_model, save_hf_model
from torch import Tensor

from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.errors import ConversionError
from pnpo_megatron.manifest import damage
from pnpo_megatron.policy.conversion import one_process, stored_hf_files
from pnpo_megatron.policy.streaming import WeightsReader

TOOLS = {"megatron": convert, "back": convert_back}
SHAPE = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def attempt(kind: str, source: Path, target: Path, started: Connection) -> None:
    started.send(True)
    TOOLS[kind](source, target, "--overwrite")


def contents(kind: str, target: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor as `load` reads it; damage of any kind is an error."""
    if kind == "back":
        folder = HfFolder(target)
        folder.check_complete()
        yield from ((name, folder.tensor(name)) for name in folder.names())
    else:
        assert damage(target) == []
        with one_process():
            yield from WeightsReader(target, stored_hf_files(target).architecture).tensors(
                torch.float32, lambda _: None
            )


def is_whole(kind: str, target: Path, candidates: list[dict[str, Tensor]]) -> bool:
    found = dict(contents(kind, target))
    return any(
        found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
        for wanted in candidates
    )


def test_the_check_itself_sees_half_a_folder(tmp_path):
    hf = save_hf_model(make_hf_model("qwen2", **SHAPE), tmp_path / "hf")
    convert(hf, tmp_path / "megatron")
    wanted = [dict(contents("back", hf))]
    assert is_whole("megatron", tmp_path / "megatron", wanted)
    (tmp_path / "megatron" / "hf" / "LICENSE").unlink()
    with pytest.raises(AssertionError):
        is_whole("megatron", tmp_path / "megatron", wanted)
    (hf / "model.safetensors").unlink()
    with pytest.raises(ConversionError):
        is_whole("back", hf, wanted)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_no_kill_leaves_half_a_checkpoint(tmp_path, kills):
    source = {"megatron": save_hf_model(make_hf_model("qwen2", **SHAPE), tmp_path / "hf")}
    source["back"] = tmp_path / "source"
    old_hf = save_hf_model(make_hf_model("qwen2", seed=8, **SHAPE), tmp_path / "old-hf")
    old = {"megatron": tmp_path / "old", "back": old_hf}
    convert(old_hf, old["megatron"])
    candidates = [dict(contents("back", hf)) for hf in (source["megatron"], old_hf)]
    start = time.monotonic()
    convert(source["megatron"], source["back"])
    longest = time.monotonic() - start
    context = multiprocessing.get_context("fork")  # what is imported here is there at once
    moments, alive, nothing = random.Random(kills), 0, 0
    work = tmp_path / "work"
    work.mkdir()
    for number in range(kills):
        kind = ("megatron", "back")[number % 2]
        target = work / kind
        shutil.rmtree(target, ignore_errors=True)
        if number % 4 >= 2:
            shutil.copytree(old[kind], target)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=attempt, args=(kind, source[kind], target, theirs))
        process.start()
        assert ours.poll(60) and ours.recv()
        time.sleep(moments.uniform(0, longest))
        alive += process.is_alive()
        process.kill()
        process.join()
        nothing += not target.exists()
        assert not target.exists() or is_whole(kind, target, candidates), (number, kind)
    assert alive > 0 and nothing > 0
    for kind in TOOLS:
        assert TOOLS[kind](source[kind], work / kind, "--overwrite") == 0
        assert is_whole(kind, work / kind, candidates[:1])
    assert sorted(path.name for path in work.iterdir()) == ["back", "megatron"]
