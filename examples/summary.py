"""Prints what a run did and draws its curves:  python summary.py RUN [RUN ...]

Reads metrics.jsonl and eval/*.json of each run folder; the plots go to RUN/plots/. Several runs, say one and
its control, are printed one after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

from pnpo_megatron.eval.avg_at_k import paired_difference, problem_means

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)

ONCE_A_STEP = ("generate", "reward", "logprobs", "sync")
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run folder, read."""

    folder: Path
    updates: list[Row]
    """One row of metrics an optimizer update."""
    evaluations: list[Row]
    """eval/step_NNNNNN.json, oldest first."""


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        FileNotFoundError: it is not one, or it has not finished an update.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give the folder of a training run")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    updates = [row for row in rows if row["kind"] == "update"]
    if not updates:
        raise FileNotFoundError(f"{path}: no update yet; wait for the first one")
    files = sorted((folder / "eval").glob("step_*.json"))
    return Run(folder, updates, [json.loads(file.read_text(encoding="utf-8")) for file in files])


def print_scores(run: Run) -> None:
    """Avg@k before and after, with standard errors and the paired gain."""
    if len(run.evaluations) < 2:
        print("  fewer than two evaluations: set eval.benchmarks to measure the gain")
        return
    first, last = run.evaluations[0], run.evaluations[-1]
    for name, before in first["benchmarks"].items():
        after, k = last["benchmarks"][name], before["k"]
        print(f"  {name}: Avg@{k} on {before['problems']} problems")
        for step, score in ((first["step"], before), (last["step"], after)):
            mean, stderr, passed = (100 * _number(score[key]) for key in ("avg_at_k", "stderr", "pass_at_k"))
            print(f"    after step {step:>4}   {mean:5.1f} %  ± {stderr:.1f}   (pass@{k} {passed:.1f} %)")
        means = [problem_means([score["correct"][problem] for problem in before["correct"]], k)
                 for score in (before, after)]
        gain = paired_difference(*means)
        print(f"    paired gain      {100 * gain.mean:+5.1f}    ± {100 * gain.stderr:.1f}"
              f"   (95 %: {100 * gain.low95:+.1f} to {100 * gain.high95:+.1f})")


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def print_course(run: Run) -> None:
    """Reward, rejections by epoch, and where the time went."""
    rewards = [row["reward/mean"] for row in run.updates if "reward/mean" in row]
    steps, skipped = len(rewards), sum(bool(row.get("update/skipped")) for row in run.updates)
    print(f"  training reward  {rewards[0]:.3f} at the first step, {rewards[-1]:.3f} at the last")
    print(f"  updates          {len(run.updates)} in {steps} rollout batches, {skipped} skipped")
    by_epoch = rejected_by_epoch(run)
    print("  rejected tokens  " + ", ".join(f"epoch {epoch} {100 * fmean(values):.1f} %"
                                            for epoch, values in by_epoch.items()))
    seconds = {name: sum(row.get(f"time/{name}_s", 0.0) for row in run.updates)
               for name in (*ONCE_A_STEP, "update")}
    print("  seconds          " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))


def rejected_by_epoch(run: Run) -> dict[int, list[float]]:
    """Rejected fraction of every update that had a valid token, by epoch of its rollout batch."""
    found: dict[int, list[float]] = defaultdict(list)
    for row in run.updates:
        if row.get("gate/rejected_fraction") is not None:
            found[row["epoch"]].append(row["gate/rejected_fraction"])
    return dict(sorted(found.items()))


def draw(run: Run) -> Path:
    """Reward, Avg@k, rejected fraction and seconds over the rollout batches; the path of the PNG."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    once = [row for row in run.updates if "reward/mean" in row]
    steps = [row["step"] for row in once]
    axes[0, 0].plot(steps, [row["reward/mean"] for row in once], marker=".")
    axes[0, 0].set(title="Training reward", ylim=(0, 1))
    for name in run.evaluations[0]["benchmarks"] if run.evaluations else ():
        scores = [evaluation["benchmarks"][name] for evaluation in run.evaluations]
        axes[0, 1].errorbar([evaluation["step"] for evaluation in run.evaluations],
                            [score["avg_at_k"] for score in scores],
                            yerr=[1.96 * (score["stderr"] or 0.0) for score in scores],
                            marker="o", capsize=3, label=f"{name}, Avg@{scores[0]['k']}")
    axes[0, 1].set(title="Held-out problems (bars: 95 %)", ylim=(0, 1))
    for epoch in rejected_by_epoch(run):
        rows = [row for row in run.updates
                if row["epoch"] == epoch and row.get("gate/rejected_fraction") is not None]
        by_step = {step: fmean(row["gate/rejected_fraction"] for row in rows if row["step"] == step)
                   for step in sorted({row["step"] for row in rows})}
        axes[1, 0].plot(list(by_step), list(by_step.values()), marker=".", label=f"epoch {epoch}")
    axes[1, 0].set(title="Rejected tokens, share", ylim=(0, None))
    update_s = [sum(row.get("time/update_s", 0.0) for row in run.updates if row["step"] == step)
                for step in steps]
    parts = [[row.get(f"time/{name}_s", 0.0) for row in once] for name in ONCE_A_STEP]
    axes[1, 1].stackplot(steps, *parts, update_s, labels=[*ONCE_A_STEP, "update"])
    axes[1, 1].set(title="Seconds a rollout batch", ylim=(0, None))
    for axis in axes.flat:
        axis.set_xlabel("rollout batch")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize="small")
    path = run.folder / "plots" / "training.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 when a folder is not a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    args = parser.parse_args(argv)
    try:
        runs = [read_run(folder) for folder in args.runs]
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for run in runs:
        print(f"\n{run.folder.resolve()}")
        print_scores(run)
        print_course(run)
        exported = sorted((run.folder / "hf").glob("step_*"))
        print(f"  exported model   {exported[-1].resolve() if exported else 'none yet'}")
        print(f"  plots            {draw(run).resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
