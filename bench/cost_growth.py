"""Time of the objective and of the scan against context parallelism and response length, as a plot.

    OMP_NUM_THREADS=1 python bench/cost_growth.py [--rounds 5] [--out FOLDER]

Draws docs/figures/cost_growth.svg (or into --out). "objective" is ratio statistics, loss and backward on one
rank, "scan" the prefix sums alone. It is CPU time of a rank's process, because eight ranks on two cores wait
for each other; the rank's share of the collective is in it. The dotted line is a perfect scan: the time of
the longest response at C = 1, divided by C and in proportion to the length.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measure import RESULTS, Bound, Row, on_ranks, options, report, take_turns

from pnpo_megatron.algorithm import make_objective, policy_loss
from pnpo_megatron.parallel.cp_layout import local_index
from pnpo_megatron.parallel.prefix_scan import prefix_scan, ratio_stats

RESPONSES = 16
LENGTHS = tuple(1024 * 2**n for n in range(8))
RANKS = (1, 2, 4, 8)
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "cost_growth.svg"
PARTS = ("objective", "scan")
LIMIT = 2.0
"""CPU time of a rank against a perfect scan's, at the longest response."""


def one_rank(lengths: tuple[int, ...], rounds: int) -> dict[int, dict[str, list[float]]]:
    """CPU seconds on this rank at every length."""
    return {length: _one_length(length, rounds) for length in lengths}


def _one_length(whole: int, rounds: int) -> dict[str, list[float]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD if size > 1 else None
    chunks = torch.full((RESPONSES,), whole // (2 * size))
    mine = local_index(chunks, size, rank)
    policy = (torch.randn(RESPONSES * whole) * 0.01)[mine].requires_grad_()
    old = torch.zeros_like(policy)
    mask = torch.ones(len(mine), dtype=torch.bool)
    position, length = mine % whole + 1, torch.full_like(mine, whole)
    advantages, share = torch.ones_like(old), torch.full_like(old, 1 / (RESPONSES * whole))
    objective = make_objective("pnpo")

    def run_objective() -> None:
        stats = ratio_stats(policy, old, mask, position, length, chunks, group)
        loss, _ = policy_loss(objective, policy, stats, advantages, share)
        torch.autograd.grad(loss, policy)

    runs = {"objective": run_objective, "scan": lambda: prefix_scan(policy.detach(), chunks, group)}
    return take_turns(runs, rounds, before=dist.barrier, clock=time.process_time)


def measure(ranks: int, rounds: int) -> list[Row]:
    """One row a length: the median over rounds of the mean over ranks."""
    results = on_ranks(one_rank, ranks, LENGTHS, rounds, timeout_s=900.0)
    rows = []
    for length in LENGTHS:
        row: Row = {"C": ranks, "length": length, "tokens a rank": RESPONSES * length // ranks}
        for part in PARTS:
            by_round = zip(*(result[length][part] for result in results), strict=True)
            row[f"{part} (CPU ms)"] = 1e3 * statistics.median(statistics.mean(times) for times in by_round)
        rows.append(row)
    return rows


def add_perfect(rows: list[Row]) -> None:
    """Each time as a multiple of the perfect one."""
    longest = max(LENGTHS)
    for part in PARTS:
        column = f"{part} (CPU ms)"
        reference = next(row[column] for row in rows if row["C"] == 1 and row["length"] == longest)
        for row in rows:
            row[f"{part} / perfect"] = row[column] / (reference * row["length"] / longest / row["C"])


def draw(rows: list[Row], path: Path) -> None:
    """One panel for each part, one line for each C."""
    figure = Figure(figsize=(9.0, 3.8), layout="constrained", facecolor="white")
    for axes, part in zip(figure.subplots(1, 2), PARTS, strict=True):
        _panel(axes, part, rows)
    with matplotlib.rc_context({"svg.hashsalt": "cost_growth"}):
        figure.savefig(path, metadata={"Date": None})


def _panel(axes: Axes, part: str, rows: list[Row]) -> None:
    for ranks in RANKS:
        times = [row[f"{part} (CPU ms)"] for row in rows if row["C"] == ranks]
        perfect = [row[f"{part} (CPU ms)"] / row[f"{part} / perfect"] for row in rows if row["C"] == ranks]
        (line,) = axes.plot(LENGTHS, times, "o-", markersize=3, label=f"C = {ranks}")
        axes.plot(LENGTHS, perfect, ":", color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="response length (tokens)", ylabel="CPU ms a rank")
    axes.set_title(f"{part}, {RESPONSES} responses")
    axes.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
    axes.plot([], [], ":", color="grey", label="perfect scan")
    axes.legend(fontsize=8)


def main() -> None:
    """All lengths for every C, then the plot."""
    parser = options(__doc__, rounds=5)
    args = parser.parse_args()
    rows: list[Row] = []
    for ranks in RANKS:
        rows += measure(ranks, args.rounds)
        print(f"C = {ranks} measured", flush=True)
    add_perfect(rows)
    draw(rows, FIGURE if args.out == RESULTS else args.out / FIGURE.name)
    longest = [row for row in rows if row["C"] > 1 and row["length"] == max(LENGTHS)]
    bounds = [
        Bound(
            f"C = {row['C']}, {row['length']:,} tokens: {part} / perfect",
            row[f"{part} / perfect"],
            LIMIT,
        )
        for part in PARTS
        for row in longest
    ]
    report("cost_growth", rows, bounds, out=args.out)


if __name__ == "__main__":
    main()
