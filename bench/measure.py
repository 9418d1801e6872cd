"""What the benchmarks share: rounds, peak memory, processes, tables and JSON.

Absolute times on a shared machine wander by a factor of three, so what is compared takes turns within one run
and only ratios are judged.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


@dataclass(frozen=True)
class Bound:
    """A figure that the project promises."""

    what: str
    measured: float
    limit: float

    @property
    def holds(self) -> bool:
        """Measured is at most the limit."""
        return self.measured <= self.limit

    def verdict(self, earlier: float = math.inf) -> str:
        """In words; over 10 % worse than the committed figure says so."""
        said = "holds" if self.holds else "DOES NOT HOLD"
        return said + f", WORSE than the committed {earlier:.4g}" * (self.measured > 1.1 * earlier)


def options(doc: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """What every script takes: `--out`, and `--rounds` where there are any."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of the result; default: %(default)s"
    )
    return parser


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: bool = True,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every run, round by round.

    Args:
        warm_up: one round more is run first, and not counted.
        before: called before every single run, outside its time (a barrier).
        clock: seconds; `time.process_time` counts CPU time, which other processes disturb less.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for counted in [False] * warm_up + [True] * rounds:
        for name, run in runs.items():
            before()
            start = clock()
            run()
            if counted:
                seconds[name].append(clock() - start)
    return seconds


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the rounds of the ratio within a round, which drifting load does not move."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def peak_bytes(run: Callable[[], object]) -> int:
    """By how much resident memory rose above its level before `run`, at the highest (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory that is used again would cost nothing
    Path("/proc/self/clear_refs").write_text("5")  # forgets the earlier peak
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory is measured on Linux only")


def in_fresh_process(function: Callable[..., Any], *args: Any, timeout_s: float = 900.0) -> Any:
    """`function(*args)` in a forked process with one thread: its memory peak is nobody else's.

    What this process has imported comes along, so slow imports happen once; it must hold no large tensor.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(_with_one_thread, function, args).result(timeout_s)


def _with_one_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    return function(*args)


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """`function(*args)` on every rank of a gloo group; the results, in rank order.

    Raises:
        TimeoutError: a rank gave no result in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(ranks, mp_context=context) as pool:
        # A rank waits for its peers before it does anything, so each process takes exactly one.
        futures = [
            pool.submit(_rank_main, rank, ranks, store.port, timeout_s, function, args)
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + timeout_s
        return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]


def _rank_main(
    rank: int, ranks: int, port: int, timeout_s: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        result = function(*args)
        dist.barrier()  # nobody leaves while a peer still reads from it
        return result
    finally:
        dist.destroy_process_group()


def report(name: str, rows: Sequence[Row], bounds: Sequence[Bound] = (), *, out: Path = RESULTS) -> None:
    """Print a Markdown table and the bounds, and write both to NAME.json in the folder `out`."""
    print(table(rows), flush=True)
    earlier = committed(name)
    for bound in bounds:
        verdict = bound.verdict(earlier.get(bound.what, math.inf))
        print(f"{bound.what}: {bound.measured:.4g}, at most {bound.limit:.4g}: {verdict}", flush=True)
    judged = [asdict(bound) | {"holds": bound.holds} for bound in bounds]
    content = {"name": name, "machine": machine(), "bounds": judged, "rows": list(rows)}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def committed(name: str) -> dict[str, float]:
    """What was measured for each bound in the last commit; nothing where there is none."""
    command = ["git", "show", f"HEAD:bench/results/{name}.json"]
    shown = subprocess.run(command, cwd=RESULTS, capture_output=True, check=False)
    if shown.returncode:
        return {}
    return {bound["what"]: bound["measured"] for bound in json.loads(shown.stdout)["bounds"]}


def table(rows: Sequence[Row]) -> str:
    """Rows of equal keys as a Markdown table."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([_shown(row[key]) for key in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def machine() -> Row:
    """Where and when the numbers were measured, without names."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
