"""A whole run folder made up from noise, with every metric that a real run logs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import tomli_w
import torch
from synthetic import dumped_by_hand, noisy_mini_batch

from pnpo_megatron.analysis.token_dump import token_arrays, write_tokens


def write_synthetic_run(
    folder: Path,
    *,
    steps: int = 20,
    epochs: int = 4,
    name: str = "pnpo",
    seed: int = 0,
    evals: bool = True,
    dumps: bool = True,
) -> Path:
    """M = 2 updates an epoch; rejection grows with epoch and position, reward with steps."""
    folder.mkdir(parents=True)
    random, update, rows = Random(seed), 0, []
    for step in range(1, steps + 1):
        for index in range(2 * epochs):
            update += 1
            row = {
                "kind": "update",
                "step": step,
                "epoch": 1 + index // 2,
                "update": update,
                "lag": float(index),
            }
            row |= update_metrics(random, lag=index, step=step, steps=steps)
            rows.append(row | (step_metrics(random, step=step, steps=steps) if index == 0 else {}))
        if evals and step % 5 == 0:
            rows.append({"kind": "eval", "step": step, "update": update} | eval_metrics(random, step / steps))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(tomli_w.dumps(settings(folder, steps, epochs, name)))
    if dumps:
        write_dumps(folder, step=steps, epochs=epochs, seed=seed)
    return folder


def update_metrics(random: Random, *, lag: int, step: int, steps: int) -> dict[str, float]:
    """What stands on every update row."""
    bins = [lag * 0.01 * (1 + place / 3) * random.uniform(0.8, 1.2) for place in range(10)]
    low = sum(bins) / 10 * 0.7
    return {
        "loss": random.gauss(0, 0.01), "grad_norm": random.uniform(0.1, 0.3), "lr": 1e-6,
        "entropy": 0.8 - 0.3 * step / steps + random.gauss(0, 0.01),
        "gate/rejected_fraction": low / 0.7, "gate/rejected_fraction_low": low,
        "gate/rejected_fraction_high": low / 0.7 - low,
        **{f"gate/rejected_fraction_bin_{place}": value for place, value in enumerate(bins)},
        "weight/mean": 1 - 1e-4 * lag, "weight/min": 1 - 1e-2 * lag, "weight/max": 1 + 1e-2 * lag,
        "log_ratio/mean": -1e-4 * lag, "log_ratio/std": 0.01 * lag**0.5, "mismatch/mean_abs": 1e-4,
        "mismatch/max_abs": 1e-3, "mismatch/kl": 1e-7, "update/skipped": 0.0, "update/skip_reason": "",
        "tokens/per_second": 5000.0, "memory/peak_bytes": 2.0**30,
        "time/update_s": random.uniform(2.8, 3.2),
    }  # fmt: skip


def step_metrics(random: Random, *, step: int, steps: int) -> dict[str, float]:
    """What stands on the first update row of a step."""
    return {
        "reward/mean": 0.2 + 0.5 * step / steps + random.gauss(0, 0.03), "reward/faults": 0.0,
        "reward/timeouts": 0.0, "response/length_mean": 200 + random.gauss(0, 10),
        "response/truncated_fraction": random.uniform(0, 0.1), "time/generate_s": random.uniform(18, 22),
        "time/reward_s": 0.5, "time/logprobs_s": 2.0, "time/sync_s": 1.0,
    }  # fmt: skip


def eval_metrics(random: Random, done: float) -> dict[str, float]:
    """Two benchmarks; the second has one problem, so no standard error."""
    score = 0.3 + 0.3 * done + random.gauss(0, 0.02)
    return {
        "eval/sums/avg_at_k": score, "eval/sums/stderr": 0.04, "eval/sums/stderr_sampling": 0.01,
        "eval/one/avg_at_k": 0.5, "eval/macro": (score + 0.5) / 2, "time/eval_s": 3.0,
    }  # fmt: skip


def settings(folder: Path, steps: int, epochs: int, name: str) -> dict[str, object]:
    """A part of a resolved configuration."""
    return {
        "seed": 42,
        "steps": steps,
        "run": {"folder": str(folder)},
        "rollout": {"prompts": 16, "group_size": 8},
        "objective": {"name": name, "epochs": epochs, "mini_batch": 8},
    }


def write_dumps(folder: Path, *, step: int, epochs: int, seed: int) -> None:
    """Token dumps of one step, the last update of each epoch."""
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        lengths = [30 + 5 * index for index in range(16)]
        sigma = 0.01 * math.sqrt(epoch)
        made = noisy_mini_batch(lengths, sigma=sigma, centred=False, generator=generator)
        arrays = token_arrays(made[0], dumped_by_hand(*made, 7e-4, 9.5e-4))
        write_tokens(
            folder, step=step, epoch=epoch, update=2 * epochs * (step - 1) + 2 * epoch, arrays=arrays
        )
