"""The reuse tax: what K epochs a batch cost in final score, from runs of one optimizer budget."""

import math
from collections.abc import Sequence
from typing import Any

from pnpo_megatron.analysis.compare_eval import compare, read_result
from pnpo_megatron.analysis.reuse import ReuseTax
from pnpo_megatron.analysis.run_folder import RunFolder


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
        tax = _tax(base, run)
        if isinstance(tax, str):
            remarks.append(f"no reuse tax of K = {epochs}: {tax}")
        else:
            taxes[epochs] = tax
    return taxes, remarks


def updates_taken(run: RunFolder) -> int:
    """Optimizer updates that moved the weights."""
    return sum(not row.get("update/skipped") for row in run.updates)


def _tax(base: RunFolder, run: RunFolder) -> ReuseTax | str:
    """In points, with its standard error; or why two runs give none."""
    if updates_taken(base) != updates_taken(run):
        counts = f"{base.name} took {updates_taken(base)} updates and {run.name} {updates_taken(run)}"
        return f"{counts}; the budgets must match"
    found = []
    for each in (base, run):
        if not each.evals or each.evals[-1]["update"] < each.updates[-1]["update"]:
            return f"{each.name} was not evaluated after its last update"
        path = each.path / "eval" / f"step_{each.evals[-1]['step']:06d}.json"
        if not path.is_file():
            return f"{each.name} has no eval/{path.name}"
        found.append(read_result(path))
    one, many = found
    if _problems(one) != _problems(many):
        return f"{base.name} and {run.name} were evaluated on different problems"
    lost = compare(many, one)["macro"]
    if math.isnan(lost.stderr):
        return "a benchmark of one problem has no standard error"
    return ReuseTax(100 * lost.mean, 100 * lost.stderr)


def _problems(result: dict[str, Any]) -> dict[str, set[str]]:
    return {name: set(one["correct"]) for name, one in result.items()}
