"""The reuse tax: what K epochs a batch cost in final score, from runs of one optimizer budget."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from pnpo_megatron.analysis.reuse import ReuseTax
from pnpo_megatron.analysis.run_folder import RunFolder
from pnpo_megatron.eval.avg_at_k import paired_difference

ProblemMeans = dict[str, dict[str, float]]
"""Per benchmark, the mean of every problem's samples."""


def reuse_taxes(runs: Sequence[RunFolder]) -> tuple[dict[int, ReuseTax], list[str]]:
    """Final macro score at one epoch minus that at K, by K, and remarks on runs that cannot be compared.

    Differences are paired by problem, so the difficulty of the problems cancels.
    """
    if len(runs) < 2:
        return {}, []
    by_epochs = {int(run.setting("objective.epochs") or 0): run for run in runs}
    if 1 not in by_epochs:
        return {}, ["no reuse tax: none of the runs has objective.epochs = 1 to compare with"]
    base = by_epochs.pop(1)
    taxes, remarks = {}, []
    for epochs, run in sorted(by_epochs.items()):
        problem = _not_comparable(base, run)
        if problem:
            remarks.append(f"no reuse tax of K = {epochs}: {problem}")
        else:
            taxes[epochs] = paired_tax(_final_scores(base), _final_scores(run))
    return taxes, remarks


def paired_tax(one: Mapping[str, Mapping[str, float]], many: Mapping[str, Mapping[str, float]]) -> ReuseTax:
    """Mean over benchmarks of the paired differences, in points, and its standard error."""
    lost = [
        paired_difference(list(many[name].values()), [one[name][problem] for problem in many[name]])
        for name in one
    ]
    return ReuseTax(
        points=100 * fmean(difference.mean for difference in lost),
        stderr=100 * math.hypot(*(difference.stderr for difference in lost)) / len(lost),
    )


def updates_taken(run: RunFolder) -> int:
    """Optimizer updates that moved the weights."""
    return sum(not row.get("update/skipped") for row in run.updates)


def _not_comparable(base: RunFolder, run: RunFolder) -> str:
    """Why two runs give no tax; empty if they do."""
    if updates_taken(base) != updates_taken(run):
        counts = f"{base.name} took {updates_taken(base)} updates and {run.name} {updates_taken(run)}"
        return f"{counts}; the budgets must match"
    for each in (base, run):
        if not each.evals or each.evals[-1]["update"] < each.updates[-1]["update"]:
            return f"{each.name} was not evaluated after its last update"
        if not _final_scores(each):
            return f"{each.name} has no eval/step_{each.evals[-1]['step']:06d}.json"
    one, many = _final_scores(base), _final_scores(run)
    if {name: set(one[name]) for name in one} != {name: set(many[name]) for name in many}:
        return f"{base.name} and {run.name} were evaluated on different problems"
    if min(len(problems) for problems in one.values()) < 2:
        return "a benchmark of one problem has no standard error"
    return ""


def _final_scores(run: RunFolder) -> ProblemMeans:
    """From the file of the last evaluation; empty if it is not there."""
    path = run.path / "eval" / f"step_{run.evals[-1]['step']:06d}.json"
    if not path.is_file():
        return {}
    benchmarks = json.loads(path.read_text(encoding="utf-8"))["benchmarks"]
    return {
        name: {problem: fmean(samples) for problem, samples in one["correct"].items()}
        for name, one in benchmarks.items()
    }
