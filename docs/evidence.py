"""Fills the tables of EVIDENCE.md and draws its figure from docs/results/{arithmetic,totals,ablations}.json.

Run from the project root, after the studies themselves:

    python docs/evidence.py [arithmetic=RESULTS] [totals=RESULTS] [ablations=RESULTS]

where RESULTS is results.json of a study's folder (examples/arithmetic_cpu/runs/study and so on).

Those that are named are copied to docs/results first.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from pnpo_megatron.analysis.compare import (
    Run,
    difference,
    grouped,
    headings,
    macro,
    markdown,
    rows_of,
    shown,
)

DOCS = Path(__file__).resolve().parent
STUDIES = ("arithmetic", "totals", "ablations")
PAIRS = (
    ("PNPO", "GRPO"), ("PNPO", "GSPO"), ("GSPO", "GRPO"),
    ("PNPO own", "GRPO"), ("PNPO own", "GSPO own"), ("PNPO own", "PNPO"), ("GSPO own", "GSPO"),
)  # fmt: skip
EPOCHS = ("epochs=1", "epochs=4")
COLORS = {"GRPO": "C0", "GSPO": "C1", "PNPO": "C2"}
Groups = Mapping[str, Sequence[Run]]


def stored(study: str) -> Path:
    """Where a study's results are kept."""
    return DOCS / "results" / f"{study}.json"


def by_epoch(groups: Groups) -> str:
    """Measured spread of log-ratios and rejected fraction by epoch, means over seeds."""
    rows: list[list[object]] = []
    for name, runs in groups.items():
        for key, words, scale in (
            ("log_ratio_std_by_epoch", "spread of log-ratios", 1.0),
            ("rejected_by_epoch", "rejected, %", 100.0),
        ):
            means = [fmean(values) * scale for values in zip(*(run[key] for run in runs), strict=True)]
            rows.append([name, words, *(f"{mean:.3f}" if scale == 1 else f"{mean:.1f}" for mean in means)])
    width = max(len(row) for row in rows)
    padded = [row + [None] * (width - len(row)) for row in rows]
    return markdown(["setting", "", *(f"epoch {epoch}" for epoch in range(1, width - 1))], padded)


def methods(groups: Groups) -> str:
    """Final scores, one method minus another at the same number of epochs."""
    rows = [
        [f"{one} - {other}", *(_gap(groups[f"{one} {k}"], groups[f"{other} {k}"]) for k in EPOCHS)]
        for one, other in PAIRS
        if f"{one} {EPOCHS[0]}" in groups and f"{other} {EPOCHS[0]}" in groups
    ]
    return markdown(["final score", "K = 1", "K = 4"], rows)


def _gap(runs: Sequence[Run], base: Sequence[Run]) -> str | None:
    gap = difference(runs, base)
    return gap and f"{shown(gap[1], '+')}, n = {gap[0]}"


def reuse(groups: Groups) -> str:
    """Four epochs minus one: at like updates, and with fewer responses than one epoch's first evaluation."""
    rows = []
    for name in [name for name in groups if name.endswith(EPOCHS[1])]:
        one, four = groups[name.replace(EPOCHS[1], EPOCHS[0])], groups[name]
        firsts = [{**run, "evaluations": run["evaluations"][1:2]} for run in one]
        seen = firsts[0]["evaluations"][0]["update"] * one[0]["responses"] // one[0]["updates"]
        rows.append([name.removesuffix(f" {EPOCHS[1]}"), _gap(four, one),
                     f"{four[0]['responses']:,} against {seen:,}", _gap(four, firsts)])  # fmt: skip
    return markdown(["K = 4 minus K = 1", "after as many updates", "responses sampled", "difference"], rows)


def draw(panels: Mapping[str, Groups]) -> None:
    """Mean score against updates and against responses sampled; thin lines are seeds."""
    with matplotlib.rc_context({"svg.hashsalt": "study", "font.size": 8.5}):
        figure = Figure(figsize=(9.0, 3.3 * len(panels)), layout="constrained", facecolor="white")
        for row, (task, groups) in zip(
            figure.subplots(len(panels), 2, sharey="row"), panels.items(), strict=True
        ):
            for axes, x in zip(row, ("updates", "responses sampled"), strict=True):
                for name, runs in groups.items():
                    if runs and " own" not in name:
                        _course(axes, name, runs, per_response=x != "updates")
                axes.set(xlabel=x, ylabel=f"{task}: Avg@2, %")
                axes.grid(alpha=0.3)
            row[1].legend()
        figure.savefig(DOCS / "results" / "study.svg", metadata={"Date": None})


def _course(axes: Any, name: str, runs: Sequence[Run], *, per_response: bool) -> None:
    style = {"color": COLORS[name.split()[0]], "linestyle": "--" if name.endswith(EPOCHS[0]) else "-"}
    scale = runs[0]["responses"] / runs[0]["updates"] if per_response else 1.0
    places = [one["update"] * scale for one in runs[0]["evaluations"]]
    courses = [[100 * macro(one) for one in run["evaluations"]] for run in runs]
    for course in courses:
        axes.plot(places, course, linewidth=0.4, alpha=0.6, **style)
    means = [fmean(column) for column in zip(*courses, strict=True)]
    axes.plot(places, means, marker="o", markersize=3, label=f"{name}, n = {len(runs)}", **style)


def main() -> None:
    """Rewrite what stands between the markers."""
    for word in sys.argv[1:]:
        study, _, path = word.partition("=")
        if study not in STUDIES:
            raise SystemExit(f"error: {word}: expected one of {', '.join(STUDIES)}, = and a file")
        stored(study).write_text(Path(path).read_text(encoding="utf-8"), encoding="utf-8")
    tables, panels = {}, {}
    for study in STUDIES:
        results = json.loads(stored(study).read_text(encoding="utf-8"))
        groups = {name: runs for name, runs in grouped(results).items() if runs}
        tables[f"{study} scores"] = markdown(headings(results), rows_of(results))
        tables[f"{study} epochs"] = by_epoch(groups)
        if study != "ablations":
            tables[f"{study} methods"], tables[f"{study} reuse"] = methods(groups), reuse(groups)
            panels[study] = groups
    page = DOCS / "EVIDENCE.md"
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, found = between.subn(lambda match, table=table: f"{match[1]}{table}{match[2]}", text)
        if found != 1:
            raise SystemExit(f"error: {page} has {found} places for {name}; expected one")
    page.write_text(text, encoding="utf-8")
    draw(panels)


if __name__ == "__main__":
    main()
