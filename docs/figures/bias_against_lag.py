"""Draws bias_against_lag.svg: error of each rung's gradient on an enumerated toy process, against lag.

Run from the project root: python docs/figures/bias_against_lag.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "analysis"))

from surrogate_bias import OPEN, exact_gradient, reused, surrogate_gradient, wanted_gradient  # noqa: E402
from toy_process import random_policy, random_rewards, true_gradient  # noqa: E402

UPDATES, RATE, PROCESSES = 32, 2.0, 20
EXACT = "cumulative, prefix score (Eq. 6)"


def errors_of(seed: int) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Relative error and cosine of every rung along one path of reuse, and the path's KL per response."""
    generator = torch.Generator().manual_seed(seed)
    behaviour, rewards = random_policy(generator), random_rewards(generator)
    learners = reused(OPEN["prefix (PNPO's)"], behaviour, rewards, UPDATES, RATE)
    wanted = [wanted_gradient(learner, behaviour, rewards) for learner in learners]
    exact = [(exact_gradient(one, behaviour, rewards), true_gradient(one, rewards)) for one in learners]
    found = {EXACT: compared(exact)}
    for name, objective in OPEN.items():
        gradients = [surrogate_gradient(objective, learner, behaviour, rewards) for learner in learners]
        found[name] = compared(list(zip(gradients, wanted, strict=True)))
    gaps = [behaviour.logprobs.sum(-1) - learner.logprobs.sum(-1) for learner in learners]
    return found, torch.stack([behaviour.mean(gap) for gap in gaps])


def compared(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Relative error and cosine of estimated and true gradients."""
    error = torch.stack([(one - true).norm() / true.norm() for one, true in pairs])
    return error, torch.stack([torch.cosine_similarity(one, true, dim=0) for one, true in pairs])


def main() -> None:
    """Two panels: relative error, and cosine with the true gradient; medians over the processes."""
    runs = [errors_of(seed) for seed in range(PROCESSES)]
    kl = torch.stack([path for _, path in runs]).median(0).values
    figure = Figure(figsize=(9.0, 3.4), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2)
    for name in [*OPEN, EXACT]:
        for panel, part in zip(panels, (0, 1), strict=True):
            values = torch.stack([found[name][part] for found, _ in runs])
            low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype), dim=0)
            panel.plot(middle, label=name)
            panel.fill_between(range(UPDATES + 1), low, high, alpha=0.15)
        middle = torch.stack([found[name][0] for found, _ in runs]).median(0).values
        print(name, [f"{middle[lag]:.3g}" for lag in (0, 1, 4, 16, UPDATES)])
    print("KL per response, nats:", [f"{kl[lag]:.4f}" for lag in (1, 4, 16, UPDATES)])
    panels[0].set(xlabel="lag: updates on one batch", ylabel="|gradient - true| / |true|")
    panels[1].set(xlabel="lag: updates on one batch", ylabel="cosine with the true gradient")
    panels[0].legend(fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "bias"}):
        figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
