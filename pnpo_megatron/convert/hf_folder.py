"""Hugging Face model folders: read lazily, written completely and published whole."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.families import hf_shapes, read_architecture
from pnpo_megatron.convert.hf_headers import CODES, INDEX, SINGLE_FILE, Stored, read_headers, read_json
from pnpo_megatron.errors import ConversionError

LOG = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BUFFERS = (".rotary_emb.inv_freq",)  # computed from config.json; older folders store it
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
)


@dataclass(frozen=True)
class HfFolder:
    """A folder with config.json and safetensors weights. Nothing is read before it is asked for."""

    path: Path
    _open_files: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise ConversionError(
                f"{self.path} is not a folder; point to one that holds config.json and safetensors"
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        """The parsed config.json."""
        return read_json(self.path / "config.json")

    @cached_property
    def architecture(self) -> Architecture:
        """What config.json describes."""
        return read_architecture(self.config, str(self.path / "config.json"))

    @cached_property
    def headers(self) -> dict[str, Stored]:
        """Where every tensor lies; reading them checks the files."""
        return read_headers(self.path)

    def stored(self, name: str) -> Stored:
        """Where one tensor lies.

        Raises:
            ConversionError: the folder does not have it.
        """
        if name not in self.headers:
            raise ConversionError(
                f"{name} is not in {self.path}, though its config.json calls for it; fetch it again"
            )
        return self.headers[name]

    def names(self) -> list[str]:
        """Every tensor name, sorted."""
        return sorted(self.headers)

    def tensor(self, name: str) -> Tensor:
        """One tensor, read now. NaN and infinity are kept, with a warning.

        Raises:
            ConversionError: the folder does not have it, or the file is damaged.
        """
        file = self.stored(name).file
        try:
            if file not in self._open_files:
                self._open_files[file] = safe_open(self.path / file, framework="pt")
            tensor: Tensor = self._open_files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConversionError(
                f"{self.path / file} is damaged at {name}: {error}; fetch it again"
            ) from None
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # NaN passes through both
            LOG.warning("%s of %s holds NaN or infinity, which is kept", name, self.path)
        return tensor

    def check_complete(self) -> None:
        """Compare names and shapes in the files with what config.json calls for; headers only.

        Raises:
            ConversionError: a tensor is missing, extra or of another shape.
        """
        expected = hf_shapes(self.architecture)
        for name, shape in expected.items():
            stored = self.stored(name)
            if stored.shape != shape:
                raise ConversionError(
                    f"{name} is {list(stored.shape)}; the config.json beside it calls for {list(shape)}. "
                    f"Weights and config.json in {self.path} come from different models: fetch"
                    " both from one revision"
                )
            if stored.dtype not in CODES.values():
                raise ConversionError(
                    f"{name} of {self.path} is stored as {stored.dtype}: quantised or whole-number weights "
                    "cannot be trained; use the folder with bfloat16 or float32 weights"
                )
        extra = [name for name in self.names() if name not in expected and not name.endswith(_BUFFERS)]
        if extra:
            tied = " (tie_word_embeddings = true allows no lm_head)" if extra == ["lm_head.weight"] else ""
            raise ConversionError(
                f"{self.path} holds {len(extra)} tensors that its config.json has no place for, first "
                f"{extra[0]}{tied}; "
                "dropping them would change the model, so nothing was converted"
            )

    def dtype(self) -> torch.dtype:
        """The one dtype all tensors are stored in, from the files' headers; what config.json says may differ.

        Raises:
            ConversionError: several dtypes, or one that is not a plain float.
        """
        codes = {
            stored.dtype for name, stored in self.headers.items() if not name.endswith(_BUFFERS)
        }
        known = {code: dtype for dtype, code in CODES.items()}
        if len(codes) != 1 or not codes <= known.keys():
            raise ConversionError(
                f"{self.path} stores {', '.join(sorted(codes))}; state the dtype to convert to: "
                "float32 or bfloat16"
            )
        return known[codes.pop()]

    def other_files(self) -> list[Path]:
        """Every file that is not a weight file: they travel byte for byte (TRAPS H28)."""
        return sorted(
            path
            for path in self.path.iterdir()
            if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES)
        )


@contextmanager
def published_whole(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling of ``target``, renamed to it when the block ends well and removed when it does not.

    Raises:
        ConversionError: ``target`` exists and ``overwrite`` is false.
    """
    if target.exists() and not overwrite:
        raise ConversionError(f"{target} exists already; choose another folder or pass --overwrite")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync_folder(folder: Path) -> None:
    """Force the folder's directory entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        target: the new folder.
        source: the folder the model came from: its architecture says what must be written (TRAPS H27), and
            its other files are copied byte for byte (TRAPS H28).
        tensors: HF names and full tensors, one by one.
        dtype: float32 or bfloat16 for all of them; None keeps what comes.
        max_shard_bytes: size above which a new safetensors file is begun.
        overwrite: replace an existing target.

    Raises:
        ConversionError: a tensor is missing, extra or of a wrong shape, or the target exists.
    """
    expected = hf_shapes(source.architecture)
    with published_whole(target, overwrite=overwrite) as folder:
        shards = _Shards(folder, max_shard_bytes)
        for name, tensor in tensors:
            if tuple(tensor.shape) != expected.get(name):
                raise ConversionError(
                    f"{name} came out as {list(tensor.shape)}; the config.json of {source.path} calls for "
                    f"{expected.get(name, 'no such tensor, or for only one')}"
                )
            shards.add(name, tensor if dtype is None else tensor.to(dtype))
            del expected[name]
        if expected:
            raise ConversionError(
                f"{len(expected)} tensors of the model were not produced, first {min(expected)}"
            )
        shards.close()
        copy_other_files(source, folder, dtype or shards.dtype)


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


class _Shards:
    """Safetensors files written one after the other, each held in memory until it is full."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.held: dict[str, Tensor] = {}
        self.held_bytes = 0
        self.written: list[tuple[Path, list[str]]] = []
        self.total_bytes = 0
        self.dtype = torch.float32

    def add(self, name: str, tensor: Tensor) -> None:
        if self.held and self.held_bytes + tensor.nbytes > self.max_bytes:
            self.flush()
        self.held[name] = tensor.detach().cpu().contiguous()
        self.held_bytes += tensor.nbytes
        self.dtype = tensor.dtype

    def flush(self) -> None:
        path = self.folder / f"part-{len(self.written):05d}"
        write_safetensors(path, self.held)
        self.written.append((path, list(self.held)))
        self.total_bytes += self.held_bytes
        self.held, self.held_bytes = {}, 0

    def close(self) -> None:
        """Give the files their names, which need the count, and write the index."""
        if self.held:
            self.flush()
        if len(self.written) == 1:
            self.written[0][0].rename(self.folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self.written, start=1):
            file = f"model-{number:05d}-of-{len(self.written):05d}.safetensors"
            path.rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, forced to disk: header length in 8 bytes, JSON header, then the data in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise ConversionError(f"{name} is {tensor.dtype}; float32, bfloat16 and float16 can be written")
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
