"""Hugging Face model folders: read lazily and strictly."""

import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.families import hf_shapes, is_float32, read_architecture
from pnpo_megatron.convert.hf_headers import CODES, Stored, read_headers, read_json
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
                f"{extra[0]}{tied}; dropping them would change the model, so nothing was converted"
            )

    def dtype(self) -> torch.dtype:
        """The one dtype all tensors are stored in, from the files' headers; what config.json says may differ.

        Raises:
            ConversionError: several dtypes, or one that is not a plain float.
        """
        left = (name for name in self.headers if name.endswith(_BUFFERS) or is_float32(name))
        codes = {self.headers[name].dtype for name in self.headers.keys() - set(left)}
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
