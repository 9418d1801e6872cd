"""What `pnpo-megatron doctor` says about the shipped cluster configurations: GB of the fullest GPU, seconds.

    PYTHONPATH=. python bench/cluster_plans.py [--out FOLDER]

Arithmetic only, nothing is run. The cluster of each is read from its own header. These are
predictions; docs/clusters.md has the assumptions.
"""

from __future__ import annotations

import re
from pathlib import Path

from measure import Row, options, report

from pnpo_megatron.config import load_config
from pnpo_megatron.planning.cluster import load_cluster
from pnpo_megatron.planning.doctor import read_shape
from pnpo_megatron.planning.job import Assumptions, Job
from pnpo_megatron.planning.step_time import predict

ROOT = Path(__file__).parents[1]
CONFIGS = (
    "pnpo_1p5b/pnpo_1_epoch",
    "pnpo_1p5b/pnpo_4_epochs",
    "qwen2p5_7b/config",
    "qwen2p5_32b/config",
    "qwen3_30b_a3b/config",
    "qwen3_235b_a22b/config",
)


def planned(name: str) -> Row:
    """One row of the table."""
    path = ROOT / "examples" / f"{name}.toml"
    found = re.search(r"--cluster (\w+)", path.read_text(encoding="utf-8"))
    assert found, f"{path} names no cluster"
    config, cluster = load_config(path), load_cluster(found[1])
    job = Job.of(config, read_shape(ROOT / config.model.hf), cluster, Assumptions())
    time = predict(job)
    memory = {part: f"{value / 1e9:.1f}" for part, value in job.memory().items()}
    return {
        "config": name,
        "cluster": found[1],
        **memory,
        "total (GB)": f"{sum(job.memory().values()) / 1e9:.1f} of {cluster.memory_gb:g}",
        "micro-batches": job.micro_batches,
        "bubble": f"{job.bubble:.0%}",
        "generate (s)": round(time.generate),
        "log-probs (s)": round(time.logprobs),
        "updates (s)": round(time.update),
        "step (s)": round(time.total),
    }


if __name__ == "__main__":
    report("cluster_plans", [planned(name) for name in CONFIGS], out=options(__doc__).parse_args().out)
