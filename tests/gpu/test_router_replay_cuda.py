"""Router replay on one GPU: weights 1 at update 1, and what flips do to log-ratios; numbers into the JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_replay_narrows_log_ratios(tmp_path: Path, family: str) -> None:
    from reference_policy import write_model
    from replay_runs import run_epochs

    from pnpo_megatron.policy.process_groups import start_distributed

    start_distributed()
    folder = write_model(tmp_path / "hf", family)
    runs = {
        f"rate {rate}, replay {'on' if replay else 'off'}, seed {seed}": run_epochs(
            folder, replayed=replay, rate=rate, seed=seed
        )
        for rate in (3e-5, 1e-4, 1e-3)
        for replay in (False, True)
        for seed in (1, 2, 3)
    }
    if target := os.environ.get("GPU_CHECK_JSON"):
        path = Path(target).with_name(f"router_replay_{family}.json")
        path.write_text(json.dumps({name: asdict(run) for name, run in runs.items()}, indent=1) + "\n")
    assert all(run.first_rejected == 0.0 for run in runs.values())
