"""Writes the matrix's results into docs/layouts.md; every row is the worst of ranks and updates.

``PYTHONPATH=tests python tests/distributed/matrix_table.py docs/layouts.md`` takes some minutes on two cores.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrix_cases import MATRIX, MODELS, MORE, Case, make_fixture
from matrix_ranks import FEW, FULL, Outcome, Run, run_cases
from spawned import run_on_ranks

HEAD = """\
| layout | ranks | updates | loss | gradient | gradient norm | metrics | between micro-batch sizes | seconds |
|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def measured(
    context: Any, cases: Mapping[str, Case], stored: bytes, runs: list[Run]
) -> dict[str, list[Outcome]]:
    """Layout -> outcome of every rank, one launch for each number of ranks."""
    found: dict[str, list[Outcome]] = {}
    for ranks in sorted({case.ranks for case in cases.values()}):
        here = {name: case for name, case in cases.items() if case.ranks == ranks}
        results = run_on_ranks(context, run_cases, ranks, (here, stored, runs), 900)
        found |= {name: [result[name] for result in results] for name in here}
        print(f"{ranks} ranks: {len(here)} layouts", file=sys.stderr, flush=True)
    return {name: found[name] for name in cases}


def table(cases: Mapping[str, Case], found: Mapping[str, list[Outcome]]) -> str:
    rows = []
    for name, outcomes in found.items():
        every = [one for outcome in outcomes for one in outcome.differences.values()]
        worst = (
            max(one.loss for one in every),
            max(one.gradient for one in every),
            max(one.norm for one in every),
            max(value for one in every for value in one.metrics.values()),
            max(one.between for one in every),
        )
        if any(outcome.red() for outcome in outcomes):
            name = f"**{name}: out of tolerance**"
        numbers = " | ".join(f"{value:.1e}" for value in worst)
        updates, seconds = len(outcomes[0].differences), max(outcome.seconds for outcome in outcomes)
        rows.append(f"| {name} | {len(outcomes)} | {updates} | {numbers} | {seconds:.1f} |\n")
    return HEAD + "".join(rows)


def main(page: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pnpo_megatron.policy"])
    with tempfile.TemporaryDirectory() as folder:
        fixtures = {model: make_fixture(Path(folder) / model, model) for model in MODELS}
        stored = pickle.dumps(fixtures)
        for mark, cases, runs in (("matrix", MATRIX, FULL), ("more", MORE, FEW)):
            rows = table(cases, measured(context, cases, stored, runs))
            before, rest = page.read_text(encoding="utf-8").split(f"<!-- {mark} -->\n", 1)
            after = rest.split(f"<!-- end of {mark} -->", 1)[1]
            text = f"{before}<!-- {mark} -->\n{rows}<!-- end of {mark} -->{after}"
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
