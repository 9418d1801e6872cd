"""What must not be in the code: waits that look at the wall clock, and readers that run what they read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow"}
RUNS_WHAT_IT_READS = {
    "pickle.load",
    "pickle.loads",
    "dill.load",
    "joblib.load",
    "torch.load",
    "numpy.load",
    "np.load",
}


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """``file:line`` and every call in a source folder."""
    for path in sorted((ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


@pytest.mark.parametrize("folder", ["pnpo_megatron", "tools"])
def test_no_wait_or_deadline_looks_at_a_clock_that_can_jump(folder):
    found = [where for where, call in calls(folder) if ast.unparse(call.func) in WALL_CLOCK]
    assert not found, "use time.monotonic() or perf_counter()"


@pytest.mark.parametrize("folder", ["pnpo_megatron", "tools"])
def test_nothing_that_could_be_code_is_unpickled(folder):
    found = [
        where
        for where, call in calls(folder)
        if ast.unparse(call.func) in RUNS_WHAT_IT_READS
        and not {"weights_only=True", "allow_pickle=False"} & set(map(ast.unparse, call.keywords))
    ]
    assert not found, "policy/checkpoint.py has the one reader of pickles, which knows names of data only"
