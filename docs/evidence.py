"""Fills the tables of EVIDENCE.md and draws its figure from docs/results/study.json.

Run from the project root, after `pnpo-megatron compare study.toml` in examples/arithmetic_cpu:

    python docs/evidence.py [examples/arithmetic_cpu/runs/study/results.json]

With a path, those results are copied to docs/results/study.json first.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from pnpo_megatron.analysis.compare import (
    differences,
    final,
    grouped,
    headings,
    interval,
    macro,
    markdown,
    problem_scores,
    rows_of,
)

DOCS = Path(__file__).resolve().parent
STORED = DOCS / "results" / "study.json"


def by_epoch(results: dict[str, Any]) -> str:
    """Measured spread of log-ratios and rejected fraction by epoch, means over seeds."""
    rows: list[list[object]] = []
    for name, runs in grouped(results).items():
        for key, words, scale in (
            ("log_ratio_std_by_epoch", "spread of log-ratios", 1.0),
            ("rejected_by_epoch", "rejected, %", 100.0),
        ):
            means = [fmean(values) * scale for values in zip(*(run[key] for run in runs), strict=True)]
            rows.append([name, words, *(f"{mean:.3f}" if scale == 1 else f"{mean:.1f}" for mean in means)])
    width = max(len(row) for row in rows)
    padded = [row + [None] * (width - len(row)) for row in rows]
    return markdown(["setting", "", *(f"epoch {epoch}" for epoch in range(1, width - 1))], padded)


def per_response(results: dict[str, Any]) -> str:
    """Four epochs at their end against one epoch at its first evaluation, which has seen more responses."""
    groups, rows = grouped(results), []
    for name in [name for name in groups if name.endswith("epochs=4")]:
        ones = {run["seed"]: run for run in groups[name.replace("epochs=4", "epochs=1")]}
        pairs = [(run, ones[run["seed"]]) for run in groups[name] if run["seed"] in ones]
        early = [one["evaluations"][1] for _, one in pairs]
        late = [problem_scores(final(four)) for four, _ in pairs]
        gaps = [
            [a - b for a, b in zip(x, problem_scores(y), strict=True)]
            for x, y in zip(late, early, strict=True)
        ]
        mean, low, high = (100 * value for value in interval(gaps))
        seen = [early[0]["update"] * one["responses"] // one["updates"] for _, one in pairs[:1]]
        rows.append([
            name, len(pairs), f"{100 * fmean(macro(final(four)) for four, _ in pairs):.1f} after "
            f"{pairs[0][0]['responses']:,}", f"{100 * fmean(map(macro, early)):.1f} after {seen[0]:,}",
            f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]",
        ])  # fmt: skip
    return markdown(["setting", "n", "its end, responses", "epochs=1, responses", "difference"], rows)


def draw(results: dict[str, Any]) -> None:
    """Mean score against updates and against responses sampled; thin lines are seeds."""
    with matplotlib.rc_context({"svg.hashsalt": "study", "font.size": 8.5}):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained", facecolor="white")
        for axes, x in zip(figure.subplots(1, 2, sharey=True), ("updates", "responses sampled"), strict=True):
            for index, (name, runs) in enumerate(grouped(results).items()):
                style = {"color": f"C{index // 2}", "linestyle": "--" if index % 2 == 0 else "-"}
                courses = []
                for run in runs:
                    scale = 1.0 if x == "updates" else run["responses"] / run["updates"]
                    places = [one["update"] * scale for one in run["evaluations"]]
                    courses.append([100 * macro(one) for one in run["evaluations"]])
                    axes.plot(places, courses[-1], linewidth=0.4, alpha=0.6, **style)
                if runs:
                    means = [fmean(column) for column in zip(*courses, strict=True)]
                    axes.plot(
                        places, means, marker="o", markersize=3, label=f"{name}, n = {len(runs)}", **style
                    )
            axes.set(xlabel=x, ylabel="Avg@2 on 256 held-out sums, %")
            axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(DOCS / "results" / "study.svg", metadata={"Date": None})


def main() -> None:
    """Rewrite what stands between the markers."""
    if len(sys.argv) > 1:
        STORED.write_text(Path(sys.argv[1]).read_text(encoding="utf-8"), encoding="utf-8")
    results = json.loads(STORED.read_text(encoding="utf-8"))
    tables = {
        "scores": markdown(headings(results), rows_of(results)),
        "differences": markdown(*differences(results)),
        "epochs": by_epoch(results),
        "responses": per_response(results),
    }
    page = DOCS / "EVIDENCE.md"
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, found = between.subn(lambda match, table=table: f"{match[1]}{table}{match[2]}", text)
        if found != 1:
            raise SystemExit(f"error: {page} has {found} places for {name}; expected one")
    page.write_text(text, encoding="utf-8")
    draw(results)


if __name__ == "__main__":
    main()
