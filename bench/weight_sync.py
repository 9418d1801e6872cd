"""Weight sync with the engine in a child process: its time against a memory copy and vLLM's own reloading.

    PYTHONPATH=. OMP_NUM_THREADS=1 python bench/weight_sync.py [--model HF_FOLDER] [--rounds 3] [--out FOLDER]

A sync writes all tensors into shared memory, checks that they are finite, sums them up on both sides, and has
vLLM load them. In every round the sync, a copy of the same bytes from memory to memory, and vLLM's reload of
the same tensors in this process take turns. Promised: at most four copies and one reload.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from itertools import count
from pathlib import Path

import torch
from measure import Bound, Row, options, report, take_turns
from safetensors.torch import load_file
from torch import Tensor

from pnpo_megatron.rollout.settings import EngineSettings, SamplerSettings
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.rollout.vllm_worker import build_engine, replace_weights

COPIES = 4
DEFAULT = Path(__file__).parents[1] / "examples" / "smollm2_cpu" / "model"


def measure(folder: Path, dtype: str, rounds: int, log: Path) -> tuple[Row, Bound]:
    """Medians over the rounds, and the promise as a ratio within each round."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(path).items()}
    target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    settings = EngineSettings(str(folder), dtype, max_model_len=64, kv_cache_memory_bytes=32 * 2**20)
    engine = build_engine(settings)
    version = count(1)
    with VllmSampler(SamplerSettings(settings, str, initial_version=0), log_path=log) as sampler:
        sampler.wait_ready()
        seconds = take_turns(
            {
                "sync": lambda: sampler.load_weights(tensors.items(), next(version)),
                "copy": lambda: [target[name].copy_(tensor) for name, tensor in tensors.items()],
                "reload": lambda: replace_weights(engine, tensors.items()),
            },
            rounds,
        )
    limits = zip(*seconds.values(), strict=True)
    ratio = statistics.median(sync / (COPIES * copy + reload) for sync, copy, reload in limits)
    row: Row = {"dtype": dtype, "MB": sum(one.nbytes for one in tensors.values()) / 1e6}
    row |= {f"{name} (s)": statistics.median(values) for name, values in seconds.items()}
    return row, Bound(f"{dtype}: sync against {COPIES} copies and a reload, time", ratio, 1)


def main() -> None:
    """One row a dtype."""
    parser = options(__doc__, rounds=3)
    parser.add_argument("--model", type=Path, default=DEFAULT)
    args = parser.parse_args()
    if not list(args.model.glob("*.safetensors")):
        raise SystemExit(f"error: {args.model} has no weights; `make smollm2` makes them, or give --model")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        found = [
            measure(args.model, dtype, args.rounds, Path(folder) / "log") for dtype in ("float32", "bfloat16")
        ]
    report("weight_sync", [row for row, _ in found], [bound for _, bound in found], out=args.out)


if __name__ == "__main__":
    main()
