"""Save and load of model and optimizer: bandwidth, and what a save in the background costs the next update.

    PYTHONPATH=. python bench/checkpoint.py [--layers 8] [--rounds 3] [--folder DIR] [--out FOLDER]

One rank, Qwen2 of hidden size 512, float32, AdamW: 12 bytes a parameter, written to the end of the disk
(fsync), with SHA-256 of every file, in the form of frequent saves (dp_reshardable). In every round an update
alone, a save that is waited for, and a save in the background with an update beside it take turns. The next
update waits for *begin*; *delay* is when it is done: on CPUs it shares the cores with the writer.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import Bound, Row, options, report

from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.data.batching import shares_of
from pnpo_megatron.manifest import damage
from pnpo_megatron.policy.checkpoint import CheckpointSave, load_checkpoint
from pnpo_megatron.policy.learner import LearnerSettings, MegatronLearner
from pnpo_megatron.policy.model import build_model
from pnpo_megatron.policy.optimizer import OptimizerSettings
from pnpo_megatron.policy.process_groups import ParallelSettings, initialize_parallel, start_distributed
from pnpo_megatron.types import MiniBatch, TrainSequence

LIMIT = 0.1
MIB = 2.0**20


def make_learner(layers: int, folder: Path) -> MegatronLearner:
    """A random policy, as `build` makes it."""
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 8192, "hidden_size": 512,
        "intermediate_size": 1536, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    arch = HfFolder(folder).architecture
    start_distributed()
    groups = initialize_parallel(ParallelSettings(), seed=1)
    chunks = build_model(arch, ParallelSettings(), dtype=torch.float32)
    settings = LearnerSettings(max_tokens=2048)
    return MegatronLearner(chunks, arch, groups, OptimizerSettings(warmup_steps=0), settings)


def make_batch(tokens: int) -> MiniBatch:
    """Eight random responses."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(tokens) >= 8
    old = torch.where(mask, -9.0, 0.0)
    sequences = tuple(
        TrainSequence(
            torch.randint(8192, (tokens,), generator=generator), mask, old, float(row % 2) - 0.5, old
        )
        for row in range(8)
    )
    return MiniBatch(sequences, shares_of(sequences, "response"), tuple(range(8)))


class Measured:
    """Seconds of every kind of work, by round."""

    def __init__(self, learner: MegatronLearner, batch: MiniBatch, folder: Path) -> None:
        self.learner, self.batch, self.folder = learner, batch, folder
        self.objective = make_objective("grpo")
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, work: Any) -> Any:
        """Run it, and note its seconds."""
        start = time.perf_counter()
        result = work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def update(self) -> None:
        """One optimizer step."""
        self.learner.update(self.batch, self.objective, step=1)

    def save(self, *, background: bool) -> CheckpointSave:
        """Model and optimizer."""
        learner = self.learner
        return CheckpointSave(
            self.folder,
            learner.chunks,
            learner.optimizer,
            learner.groups,
            portable=False,
            background=background,
        )

    def round(self) -> None:
        """Everything once."""
        self.time("update alone", self.update)
        self.time("save, waited for", lambda: self.save(background=False).finish())
        self.time("check", lambda: damage(self.folder))
        learner = self.learner
        self.time(
            "load", lambda: load_checkpoint(self.folder, learner.chunks, learner.optimizer, learner.groups)
        )
        start = time.perf_counter()
        save = self.time("begin in the background", lambda: self.save(background=True))
        self.time("update beside it", self.update)
        beside = time.perf_counter() - start - self.seconds["update alone"][-1]
        self.seconds.setdefault("delay", []).append(beside)
        while not save.is_written:
            self.time("further updates beside it", self.update)
        self.time("publish", save.finish)


def main() -> None:
    """Measure and report."""
    parser = options(__doc__, rounds=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="disk to write to; default the temporary folder's")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        learner = make_learner(arguments.layers, work / "model")
        measured = Measured(learner, make_batch(arguments.tokens), work / "checkpoint")
        gc.freeze()  # as a run does
        measured.round()
        measured.seconds.clear()
        for _ in range(arguments.rounds):
            measured.round()
        size = sum(path.stat().st_size for path in measured.folder.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(work)
    moved = {"save, waited for", "check", "load"}
    rows: list[Row] = [
        {
            "work": name,
            "seconds (median)": statistics.median(seconds),
            "fastest": min(seconds),
            "MiB/s": size / MIB / statistics.median(seconds) if name in moved else "",
        }
        for name, seconds in measured.seconds.items()
    ]
    whole = measured.seconds["save, waited for"]
    ratios = [a / b for a, b in zip(measured.seconds["begin in the background"], whole, strict=True)]
    what = f"wait before the next update / a save that is waited for ({size / MIB:.0f} MiB)"
    report("checkpoint", rows, [Bound(what, statistics.median(ratios), LIMIT)], out=arguments.out)


if __name__ == "__main__":
    main()
