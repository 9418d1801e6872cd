"""``pnpo-megatron compare-eval A B``: paired differences of two evaluations on the same problems."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pnpo_megatron.errors import DONE, DataError
from pnpo_megatron.eval.avg_at_k import (
    Difference,
    macro_difference,
    paired_difference,
    percent,
    problem_means,
)


def main(words: Sequence[str]) -> int:
    """Print Avg@k of both and the mean of per-problem differences, with its 95 % interval."""
    parser = argparse.ArgumentParser(prog="pnpo-megatron compare-eval")
    parser.add_argument("before", type=Path, help="result file (step_NNNNNN.json) of `eval` or of a run")
    parser.add_argument("after", type=Path, help="the other one, on the same problems")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(words)
    before, after = read_result(arguments.before), read_result(arguments.after)
    differences = compare(before, after)
    if arguments.json:
        print(json.dumps({name: vars(value) for name, value in differences.items()}, indent=1))
    else:
        Console(highlight=False, soft_wrap=True).print(_table(before, after, differences))
    return DONE


def read_result(path: Path) -> dict[str, Any]:
    """A result file's benchmarks.

    Raises:
        DataError: no such file, or not a result file.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["benchmarks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: no evaluation result ({error}); give the step_NNNNNN.json that eval wrote"
        ) from error


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Difference]:
    """After minus before on every benchmark that both hold, and their plain mean as ``macro``.

    Raises:
        DataError: no benchmark in common, or one with other problems.
    """
    names = [name for name in before if name in after]
    if not names:
        raise DataError(f"the results share no benchmark: {list(before)} and {list(after)}")
    differences = {}
    for name in names:
        old, new = before[name]["correct"], after[name]["correct"]
        if old.keys() != new.keys():
            lonely = sorted(old.keys() ^ new.keys())
            raise DataError(f"{name}: {len(lonely)} problems stand in one result only, first {lonely[0]!r}; "
                            "score both models on the same file")  # fmt: skip
        late = problem_means([new[problem] for problem in old], after[name]["k"])
        differences[name] = paired_difference(problem_means(list(old.values()), before[name]["k"]), late)
    return differences | {"macro": macro_difference(list(differences.values()))}


def _table(before: dict[str, Any], after: dict[str, Any], differences: dict[str, Difference]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("benchmark", "problems", "before", "after", "difference", "± stderr", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "benchmark" else "right")
    for name, one in differences.items():
        sides = [percent(side[name]["avg_at_k"]) if name in side else "" for side in (before, after)]
        count = str(before[name]["problems"]) if name in before else ""
        interval = f"{percent(one.low95, '+')} to {percent(one.high95, '+')}"
        table.add_row(name, count, *sides, percent(one.mean, "+"), percent(one.stderr), interval)
    return table
