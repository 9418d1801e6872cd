"""Hugging Face model folders written one tensor at a time, and published whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pnpo_megatron.convert.families import dtype_of, hf_shapes
from pnpo_megatron.convert.hf_folder import DTYPES, HfFolder
from pnpo_megatron.convert.hf_headers import CODES, INDEX, SINGLE_FILE
from pnpo_megatron.durable import locked, sync_path
from pnpo_megatron.errors import ConversionError


@contextmanager
def published_whole(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder beside ``target``: flushed and renamed to it when the block ends well, removed otherwise.

    A kill leaves nothing under the target's name, or a whole folder; what it leaves beside is removed by the
    next run to the same target.

    Raises:
        ConversionError: ``target`` exists and ``overwrite`` is false.
    """
    refuse_existing(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        with locked(partial):
            yield partial
            for path in (*partial.rglob("*"), partial):
                sync_path(path)
            if target.exists():
                target.rename(partial.with_name(f"{partial.name}-old"))
            partial.rename(target)
            sync_path(target.parent)
        _remove_leftovers(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Raise a ConversionError where the target exists and may not be replaced."""
    if out.exists() and not overwrite:
        raise ConversionError(f"{out} exists already; choose another folder or pass --overwrite")


def _remove_leftovers(target: Path) -> None:
    """What killed runs left of ``target``; a living run holds a lock on its folder."""
    for left in target.parent.glob(f".{target.name}.partial-*"):
        with locked(left) as ours:
            if ours:
                shutil.rmtree(left)


_WORTH_FLUSHING = 16 * 2**20


def write_hf_folder(
    target: Path,
    source: HfFolder,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2 * 2**30,
    overwrite: bool = False,
) -> None:
    """Write a new HF folder from a stream of tensors, beside the target first and renamed when complete.

    Args:
        source: the folder the model came from: its architecture says what must be written (TRAPS H27), and
            its other files are copied byte for byte (TRAPS H28).
        tensors: HF names and full tensors, one by one, in any order; none is kept.
        dtype: float32 or bfloat16 for all of them; None takes the first one's.
        max_shard_bytes: size above which a new safetensors file is begun.

    Raises:
        ConversionError: a tensor is missing, extra or of a wrong shape, or the target exists.
    """
    expected = hf_shapes(source.architecture)
    with (
        published_whole(target, overwrite=overwrite) as folder,
        ThreadPoolExecutor(1, thread_name_prefix="flush") as beside,
    ):
        places: dict[str, tuple[Path, int]] = {}
        flushes = []
        for name, tensor in tensors:
            dtype = dtype or tensor.dtype
            places = places or _lay_out(folder, expected, dtype, max_shard_bytes)
            if tuple(tensor.shape) != expected.get(name):
                raise ConversionError(
                    f"{name} came out as {list(tensor.shape)}; the config.json of {source.path} calls for "
                    f"{expected.get(name, 'no such tensor, or for only one')}"
                )
            del expected[name]
            _put(*places[name], tensor.detach().to("cpu", dtype_of(name, dtype)))
            if tensor.nbytes >= _WORTH_FLUSHING:
                flushes.append(beside.submit(sync_path, places[name][0]))
        if expected or dtype is None:
            raise ConversionError(
                f"{len(expected)} tensors of the model were not produced, first {min(expected)}"
            )
        copy_other_files(source, folder, dtype)
        for flush in flushes:
            flush.result()  # the kernel tells an error of the disk once: to the first who flushes


def copy_other_files(source: HfFolder, folder: Path, dtype: torch.dtype) -> None:
    """All files but the weights, byte for byte; only a changed dtype is rewritten, in config.json."""
    for path in source.other_files():
        shutil.copyfile(path, folder / path.name)
    name = next(name for name, value in DTYPES.items() if value == dtype)
    config = dict(source.config)
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) != name:
        config[key] = name
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _lay_out(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int
) -> dict[str, tuple[Path, int]]:
    """Begin every file of a model with its header, and write the index; file and offset of each tensor."""
    shards: list[dict[str, int]] = [{}]
    held = total = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype_of(name, dtype).itemsize
        if shards[-1] and held + size > max_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = held
        held, total = held + size, total + size
    if len(shards) == 1:
        return _begin(folder / SINGLE_FILE, shards[0], shapes, dtype)
    places: dict[str, tuple[Path, int]] = {}
    for number, offsets in enumerate(shards, start=1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= _begin(file, offsets, shapes, dtype)
    weight_map = {name: places[name][0].name for name in sorted(places)}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return places


def _begin(
    path: Path, offsets: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, tuple[Path, int]]:
    """A safetensors file up to its data: header length in 8 bytes, then the JSON header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, offset in offsets.items():
        kept = dtype_of(name, dtype)
        end = offset + torch.Size(shapes[name]).numel() * kept.itemsize
        header[name] = {"dtype": CODES[kept], "shape": list(shapes[name]), "data_offsets": [offset, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return {name: (path, 8 + len(text) + offset) for name, offset in offsets.items()}


def _put(path: Path, offset: int, tensor: Tensor) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
