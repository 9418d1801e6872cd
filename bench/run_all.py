"""`make bench`: every benchmark in turn, the seconds of each, and one list of all that is judged.

    python bench/run_all.py [--more] [--only NAME ...] [--out FOLDER]

--more runs what takes too long for the rest. Results go to bench/results, or to FOLDER. A figure that is over
10 % worse than in the last commit is marked; all figures are ratios to a reference of the same run, bytes or
shares, none is a time. A script that fails is named, the others run, and the exit code is 1.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from measure import Bound, Row, committed, options, table

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-bench/bin/python"
SCRIPTS = (
    "packing",
    "cluster_plans",
    "doctor_errors",
    "peers",
    "communication",
    "cost_growth",
    "head_memory",
    "checkpoint",
    "conversion",
    "weight_sync",
    "objective_cost",
    "rollout_throughput",
)
MORE = {"head_memory": ("--long",)}
DEADLINE_S = 1200.0


def run(name: str, arguments: Sequence[str]) -> bool:
    """One script, with its seconds; whether it succeeded."""
    print(f"bench: {name}", flush=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
        "PYTHONWARNINGS": "ignore::UserWarning",  # Megatron's, at every import
    }
    python = PEERS if name == "objective_cost" else sys.executable
    begin, before = time.perf_counter(), _cpu_seconds()
    command = [str(python), str(ROOT / "bench" / f"{name}.py"), *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all it has started
    wall, cpu = time.perf_counter() - begin, _cpu_seconds() - before
    end = f"exit code {code} after " if code else ""
    print(f"bench: {name}: {end}{wall:.0f} s, {cpu:.0f} CPU s\n", flush=True)
    return code == 0


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judged(results: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """One row a figure of these result files, and the committed figures that they lack."""
    rows: list[Row] = []
    missing: list[str] = []
    for path in results:
        earlier, bounds = committed(path.stem), json.loads(path.read_text())["bounds"]
        for entry in bounds:
            bound = Bound(entry["what"], entry["measured"], entry["limit"])
            verdict = bound.verdict(earlier.get(bound.what, math.inf))
            row: Row = {"benchmark": path.stem, "figure": bound.what, "measured": bound.measured}
            rows.append(row | {"limit": bound.limit, "verdict": verdict})
        missing += [f"{path.stem}: {what}" for what in earlier.keys() - {entry["what"] for entry in bounds}]
    return rows, sorted(missing)


def summary(rows: Sequence[Row], missing: Sequence[str], failed: Sequence[str]) -> str:
    """All figures, and again those that do not hold or got worse."""
    bad = [row for row in rows if row["verdict"] != "holds"]
    broken = sum("NOT" in row["verdict"] for row in rows)
    worse = sum("WORSE" in row["verdict"] for row in rows)
    lines = ["bench: all figures", table(rows) if rows else "none", ""]
    lines += [f"bench: of {len(rows)} figures {broken} do not hold, {worse} are WORSE than committed by 10 %"]
    lines += [table(bad)] if bad else []
    lines += [f"bench: committed, but not measured this time: {what}" for what in missing]
    lines += [f"bench: {name} FAILED" for name in failed]
    return "\n".join(lines)


def main() -> int:
    """Run, then judge what was written."""
    parser = options(__doc__)
    parser.add_argument("--more", action="store_true", help="what takes too long for the rest")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, metavar="NAME", help=", ".join(SCRIPTS))
    args = parser.parse_args()
    begin, clock = time.time(), time.perf_counter()
    scripts = MORE if args.more else dict.fromkeys(SCRIPTS, ())
    chosen = {name: more for name, more in scripts.items() if name in (args.only or scripts)}
    failed = [
        name
        for name, arguments in chosen.items()
        if not run(name, (*arguments, "--out", str(args.out.resolve())))
    ]
    written = [path for path in args.out.glob("*.json") if path.stat().st_mtime >= begin]
    print(summary(*judged(sorted(written, key=lambda path: path.stat().st_mtime)), failed))
    print(f"bench: {time.perf_counter() - clock:.0f} s in all", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
