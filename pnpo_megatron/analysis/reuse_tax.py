"""The reuse tax: what K epochs a batch cost in final score, from runs of one optimizer budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from pnpo_megatron.analysis.reuse import ReuseTax
from pnpo_megatron.analysis.run_folder import Row, RunFolder, number


def reuse_taxes(runs: Sequence[RunFolder]) -> tuple[dict[int, ReuseTax], list[str]]:
    """Final macro score at one epoch minus that at K, by K, and remarks on runs that cannot be compared."""
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
            continue
        (one, one_error), (many, many_error) = _final_macro(base), _final_macro(run)
        taxes[epochs] = ReuseTax(points=100 * (one - many), stderr=100 * math.hypot(one_error, many_error))
    return taxes, remarks


def _taken(run: RunFolder) -> int:
    return sum(not row.get("update/skipped") for row in run.updates)


def _not_comparable(base: RunFolder, run: RunFolder) -> str:
    """Why two runs give no tax; empty if they do."""
    if not (base.evals and run.evals):
        return f"{(run if base.evals else base).path} has no evaluation"
    if _taken(base) != _taken(run):
        return f"{base.name} took {_taken(base)} updates and {run.name} {_taken(run)}; the budgets must match"
    if _benchmarks(base.evals[-1]) != _benchmarks(run.evals[-1]):
        return f"{base.name} and {run.name} were evaluated on different benchmarks"
    for each in (base, run):
        if each.evals[-1]["update"] < each.updates[-1]["update"]:
            return f"{each.name} was not evaluated after its last update"
    return ""


def _benchmarks(row: Row) -> list[str]:
    return sorted(key.split("/")[1] for key in row if key.startswith("eval/") and key.endswith("/avg_at_k"))


def _final_macro(run: RunFolder) -> tuple[float, float]:
    """Mean of the benchmarks' scores at the last evaluation, and its sampling error where that is logged."""
    row = run.evals[-1]
    names = _benchmarks(row)
    scores = [float(row[f"eval/{name}/avg_at_k"]) for name in names]
    errors = [_score_error(row, name) for name in names]
    return fmean(scores), math.sqrt(math.fsum(error**2 for error in errors)) / len(names)


def _score_error(row: Row, name: str) -> float:
    """The same problems are compared, so their difficulty cancels: sampling noise only, where it is known."""
    sampling = number(row, f"eval/{name}/stderr_sampling")
    return sampling if sampling is not None else float(row[f"eval/{name}/stderr"])
