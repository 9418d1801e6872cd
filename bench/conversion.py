"""Conversion of a full-size model both ways: time against a plain copy, memory against the largest tensor.

    OMP_NUM_THREADS=1 python bench/conversion.py [--layers 28] [--rounds 1] [--folder DIR] [--out FOLDER]

The shape is Qwen2-1.5B's, untied (R1-Distill-Qwen-1.5B): 3.5 GB of random bfloat16. Needs four times that on
the disk of --folder, and removes it. Each conversion is the command line in a process of its own, its imports
included; its anonymous resident memory (no page cache, no mapped files) is sampled every 5 ms from outside
and counted above that of an interpreter that has imported torch. The copy is of the same bytes, with fsync.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from measure import Bound, Row, options, report
from torch import Tensor

from pnpo_megatron.convert.families import hf_shapes
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.hf_writer import write_hf_folder
from pnpo_megatron.durable import sync_path

TOOLS = Path(__file__).parents[1] / "tools" / "checkpoint_convert"
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIB = 2.0**20


def make_model(folder: Path, layers: int) -> HfFolder:
    """Random weights, made one tensor at a time."""
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    config = HfFolder(folder / "config")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, shape in hf_shapes(config.architecture).items():
            yield name, torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.1, 0.1)

    write_hf_folder(folder / "hf", config, tensors())
    return HfFolder(folder / "hf")


def anonymous_bytes(process: int | str) -> int:
    """RssAnon of a process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return max((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), default=0)


def watched(command: Sequence[str], timeout_s: float = 1800.0) -> tuple[float, int]:
    """Seconds and the peak of anonymous memory of a command, which must succeed."""
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(0.005)
        if time.perf_counter() - start > timeout_s:
            process.kill()
    if process.wait():
        raise RuntimeError(f"{command[0]} ended with {process.returncode}")
    return time.perf_counter() - start, peak


def plain_copy(source: Path, target: Path) -> tuple[float, int]:
    """Seconds of a copy that is on the disk when it ends."""
    start = time.perf_counter()
    shutil.copytree(source, target)
    for path in (*target.iterdir(), target):
        sync_path(path)
    return time.perf_counter() - start, 0


def measure(folder: Path, rounds: int) -> list[Row]:
    """One row a way, medians over the rounds; all take turns, with clean disk caches in between."""
    hf, megatron, back, copy = (folder / name for name in ("hf", "megatron", "back", "copy"))
    runs: dict[str, Callable[[], tuple[float, int]]] = {
        "plain copy": lambda: plain_copy(hf, copy),
        "HF to Megatron": lambda: watched(
            [str(TOOLS / "hf_to_megatron.py"), "--hf", str(hf), "--out", str(megatron)]
        ),
        "Megatron to HF": lambda: watched(
            [str(TOOLS / "megatron_to_hf.py"), "--megatron", str(megatron), "--out", str(back)]
        ),
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for path in (megatron, back, copy):
            shutil.rmtree(path, ignore_errors=True)
        for name, run in runs.items():
            os.sync()
            found[name].append(run())
            print(f"{name}: {found[name][-1][0]:.1f} s", flush=True)
    return [
        {
            "run": name,
            "seconds": statistics.median(seconds for seconds, _ in each),
            "against the copy": statistics.median(
                seconds / copied for (seconds, _), (copied, _) in zip(each, found["plain copy"], strict=True)
            ),
            "peak": max(peak for _, peak in each),
        }
        for name, each in found.items()
    ]


def torch_alone() -> int:
    """Anonymous memory of an interpreter that has imported torch."""
    code = "import torch; print(open('/proc/self/status').read())"
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon"))


def main() -> None:
    """One row for the copy and one for each way."""
    parser = options(__doc__, rounds=1)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--folder", type=Path, help="where to work; default: the system's temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="conversion-", dir=args.folder) as name:
        folder = Path(name)
        source = make_model(folder, args.layers)
        largest = 2 * max(torch.Size(shape).numel() for shape in hf_shapes(source.architecture).values())
        total = sum(path.stat().st_size for path in source.path.glob("*.safetensors"))
        rows, base = measure(folder, args.rounds), torch_alone()
        names = sorted(path.name for path in source.path.iterdir())
        _, differ, missing = filecmp.cmpfiles(source.path, folder / "back", names, shallow=False)
    bounds = [Bound("files that differ after both ways", len(differ) + len(missing), 0)]
    for row in rows:
        above = max(0, row.pop("peak") - base)
        row |= {"MB/s": total / row["seconds"] / 1e6, "peak above torch (MiB)": above / MIB}
        row["peak in largest tensors"] = above / largest
        if row["run"] != "plain copy":
            bounds.append(Bound(f"{row['run']}: peak, in largest tensors", above / largest, 3))
            bounds.append(Bound(f"{row['run']}: time against the copy", row["against the copy"], 3))
    report("conversion", rows, bounds, out=args.out)


if __name__ == "__main__":
    main()
