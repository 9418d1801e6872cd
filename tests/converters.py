"""The command lines of tools/checkpoint_convert, called in this process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load_script(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool(name: str) -> ModuleType:
    """One of the scripts of tools/checkpoint_convert."""
    return load_script(ROOT / "tools" / "checkpoint_convert" / f"{name}.py")


def convert(hf: Path, megatron: Path, *more: str) -> int:
    """hf_to_megatron.py; its exit code."""
    return int(tool("hf_to_megatron").main(["--hf", str(hf), "--out", str(megatron), *more]))


def convert_back(megatron: Path, hf: Path, *more: str) -> int:
    """megatron_to_hf.py; its exit code."""
    return int(tool("megatron_to_hf").main(["--megatron", str(megatron), "--out", str(hf), *more]))


def verify(hf: Path, megatron: Path, *more: str) -> int:
    """verify.py; its exit code."""
    return int(tool("verify").main(["--hf", str(hf), "--megatron", str(megatron), *more]))
