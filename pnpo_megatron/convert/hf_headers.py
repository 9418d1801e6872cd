"""Where every tensor of a Hugging Face folder lies, from the headers of its files alone.

Nothing damaged is passed on: a header that does not account for every byte of its file, a name given twice,
an index that disagrees with the files (TRAPS H27).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pnpo_megatron.errors import ConversionError

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_FORMATS = ("pt", "mlx")


@dataclass(frozen=True)
class Stored:
    """One tensor as its file's header has it."""

    file: str
    dtype: str
    """The file's code, such as BF16."""
    shape: tuple[int, ...]
    nbytes: int


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConversionError: the file is missing, or is not a JSON object.
    """
    try:
        return _json_object(path.read_bytes())
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing; point to a folder written by save_pretrained") from None
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} is not readable as JSON: {error}") from None


def _json_object(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{key!r} is given twice")
            found[key] = value
        return found

    try:
        values = json.loads(text.decode(), object_pairs_hook=once)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}; expected an object")
    return values


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's model.

    Raises:
        ConversionError: no safetensors, a damaged file, or an index that disagrees with the files.
    """
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    claimed = _read_index(folder) if (folder / INDEX).exists() else None
    if claimed is not None:
        files = sorted(set(claimed.values()))
        if SINGLE_FILE in names and SINGLE_FILE not in files:
            raise ConversionError(f"{folder} has both {SINGLE_FILE} and {INDEX}; remove the stale one")
    elif SINGLE_FILE in names:
        files = [SINGLE_FILE]
    elif len(names) == 1:
        files = names
    else:
        raise ConversionError(
            f"{folder} has {len(names)} safetensors files and no {INDEX}; save the model with save_pretrained"
        )
    found = _joined(folder, files)
    if claimed is not None:
        _compare_with_index(folder / INDEX, claimed, {name: stored.file for name, stored in found.items()})
    return found


def _joined(folder: Path, files: Sequence[str]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in read_header(folder / file).items():
            if name in found:
                raise ConversionError(
                    f"{name} is in both {found[name].file} and {file} of {folder}; fetch it again"
                )
            found[name] = stored
    return found


def _read_index(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise ConversionError(f"{folder / INDEX} has no usable weight_map; fetch the folder again")
    outside = [name for name in weight_map.values() if Path(name).name != name or "\0" in name]
    if outside:
        raise ConversionError(
            f"{folder / INDEX} names {outside[0]!r}, which is not a file name in that folder"
        )
    return weight_map


def _compare_with_index(index: Path, claimed: dict[str, str], found: dict[str, str]) -> None:
    odd = sorted(name for name in claimed.keys() | found.keys() if claimed.get(name) != found.get(name))
    if odd:
        says, has = claimed.get(odd[0], "absent"), found.get(odd[0], "absent")
        raise ConversionError(
            f"{index} and the files it names disagree about {len(odd)} tensors, first {odd[0]}: the index "
            f"says {says}, found {has}; fetch the folder again"
        )


def read_header(path: Path) -> dict[str, Stored]:
    """Every tensor of one safetensors file.

    Raises:
        ConversionError: the file is missing, or its header does not account for every byte of it.
    """
    try:
        with safe_open(path, framework="pt"):  # checks lengths, types, gaps and overlaps
            pass
        with path.open("rb") as file:
            header = _json_object(file.read(int.from_bytes(file.read(8), "little")))
        metadata = header.pop("__metadata__", None)
        if metadata is not None and metadata.get("format") not in _FORMATS:
            raise ValueError(f"its __metadata__ is {metadata!r:.100}; expected format 'pt'")
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing though the index names it; fetch it again") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise ConversionError(f"{path} is damaged: {error}; fetch it again") from None
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = Stored(path.name, entry["dtype"], tuple(entry["shape"]), end - begin)
    return found
