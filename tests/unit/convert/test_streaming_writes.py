"""What is flushed and hashed beside the writing: the same digests, and no error of the disk is lost."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from hf_models import make_hf_model, save_hf_model

from pnpo_megatron.convert import hf_writer
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.manifest import Follower, digest


@pytest.mark.parametrize("step", [1, 1000, 2**30])
def test_a_followed_file_has_the_digest_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(Follower, "STEP", step)
    draw, path = random.Random(0), tmp_path / "file"
    with path.open("wb") as file, Follower(path) as follower:
        for _ in range(20):
            file.write(draw.randbytes(draw.randrange(3000)))
            file.flush()
            follower.reached(file.tell())
        found = follower.digest(file.tell())
    assert found == digest(path)


def test_an_error_of_an_early_flush_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = HfFolder(save_hf_model(make_hf_model("qwen2"), tmp_path / "hf"))
    told: list[Path] = []

    def flush(path: Path) -> None:
        if path.suffix == ".safetensors" and not told:  # the kernel tells it once
            told.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(hf_writer, "sync_path", flush)
    monkeypatch.setattr(hf_writer, "_WORTH_FLUSHING", 1)
    tensors = [(name, source.tensor(name)) for name in source.names()]
    with pytest.raises(OSError, match="Input/output error"):
        hf_writer.write_hf_folder(tmp_path / "out", source, tensors)
    assert told and not (tmp_path / "out").exists()
