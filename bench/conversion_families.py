"""The family table of docs/conversion.md: every family there and back, and its logits against transformers.

    PYTHONPATH=.:tests OMP_NUM_THREADS=1 python bench/conversion_families.py

Random float32 models of 4 layers, hidden 256, vocabulary 32,003 (padded to 32,128), biases and norms random;
2,000 tokens. Seconds are of one conversion each way, after one that is not counted.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import time
from pathlib import Path

import torch
from converters import convert, convert_back, verify
from hf_models import CLASSES, EXTRA, make_hf_model, save_hf_model

from pnpo_megatron.convert.hf_folder import HfFolder

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 32003, "initializer_range": 0.05}


def seconds(run: object, *args: Path) -> float:
    """Of one call, which has to succeed; what it prints is dropped."""
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        assert callable(run) and run(*args, "--overwrite") == 0
    return time.perf_counter() - start


def row(family: str, work: Path) -> str:
    """One line of the table."""
    wide = {key: 8 * value for key, value in EXTRA.get(family, {}).items() if key == "moe_intermediate_size"}
    hf = save_hf_model(make_hf_model(family, **SHAPE, **wide), work / "hf")
    seconds(convert, hf, work / "megatron")
    there = seconds(convert, hf, work / "megatron")
    back = seconds(convert_back, work / "megatron", work / "back")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        verify(hf, work / "megatron")
    text = printed.getvalue()
    logits, tokens = re.findall(r"^log\S+ +differ by up to ([\d.e-]+)", text, re.M)
    source, copy = HfFolder(hf), HfFolder(work / "back")
    same = all(torch.equal(source.tensor(name), copy.tensor(name)) for name in source.names())
    size = sum(stored.nbytes for stored in source.headers.values()) / 2**20
    return (
        f"| `{family}` | {'equal' if same else 'NOT EQUAL'} | {logits} | {tokens} | "
        f"{'1e-4' if source.architecture.experts else '1e-5'} | {size:.0f} MiB | {there:.1f} | {back:.1f} |"
    )


def main() -> None:
    """Print the table."""
    print("| `model_type` | bytes after both ways | logits | log-probs | bound | size | s there | s back |")
    print("|---|---|---|---|---|---|---|---|")
    for family in CLASSES:
        with tempfile.TemporaryDirectory() as work:
            print(row(family, Path(work)), flush=True)


if __name__ == "__main__":
    main()
