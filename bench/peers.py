"""The arithmetic example through TRL 1.16's GRPOTrainer (num_iterations = 4) and through this product.

    PYTHONPATH=. .venv/bin/python bench/peers.py [--steps 6]

Same model, prompts, rewards, temperature, learning rate, grpo objective and number of updates, two threads
each. TRL generates with transformers, which is what it does without a vLLM server. Both final models are
scored by `pnpo-megatron eval`. CPU time is of the whole process tree, start-up included; seconds an update
are of the loop alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measure import Bound, Row, report

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic_cpu"
UPDATES_A_STEP, PROMPTS = 8, 64


def tree_bytes(pid: int) -> int:
    """Resident bytes of a process and all below it."""
    total, pending = 0, [pid]
    while pending:
        one = pending.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * resource.getpagesize()
            for task in Path(f"/proc/{one}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def run(command: list[str], timeout_s: float) -> Row:
    """Wall and CPU seconds, and peak resident memory of the whole tree."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, cwd=EXAMPLE, env=environment, stdout=subprocess.DEVNULL)
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.5):
            peak = max(peak, tree_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = process.wait(timeout_s)
    finally:
        process.kill()
        done.set()
        watcher.join()
    if code:
        raise RuntimeError(f"exit code {code} of {' '.join(command)}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": time.perf_counter() - start, "cpu": cpu, "peak": peak}


def ours(out: Path, steps: int) -> Row:
    """This product; generation and training tokens from its own rows."""
    settings = (EXAMPLE / "config.toml").read_text().splitlines()
    config = out.with_suffix(".toml")  # pnpo's tolerances are no settings of grpo
    config.write_text("\n".join(line for line in settings if not line.startswith("gate_")) + "\n")
    used = run(
        [
            str(ROOT / ".venv/bin/pnpo-megatron"), "train", str(config), f"--steps={steps}",
            f"--run.folder={out}", "--objective.name=grpo", "--objective.epochs=4", "--eval.benchmarks=[]",
            "--checkpoint.every=0", "--rollout.threads=2",
        ],
        3600.0,
    )  # fmt: skip
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "update"]
    timers = ("generate_s", "reward_s", "logprobs_s", "update_s", "sync_s")
    seconds = sum(row.get(f"time/{name}", 0.0) for row in rows for name in timers)
    generated = sum(row.get("response/length_mean", 0.0) for row in rows) * PROMPTS * 8
    [model] = (out / "hf").iterdir()
    return {**used, "seconds": seconds, "updates": len(rows), "generated": generated, "model": model}


def theirs(out: Path, steps: int) -> Row:
    """TRL."""
    out.mkdir()
    command = [str(ROOT / ".venv-bench/bin/python"), str(ROOT / "bench/peers_trl.py"), str(EXAMPLE), str(out)]
    used = run([*command, str(steps)], 3600.0)
    return {**used, **json.loads((out / "result.json").read_text()), "model": out / "hf"}


def accuracy(model: Path, out: Path) -> float:
    """Avg@8 on the held-out sums, in percent."""
    run(
        [
            str(ROOT / ".venv/bin/pnpo-megatron"), "eval", "--model", str(model), "--benchmark",
            "data/heldout.jsonl", "--samples", "8", "--temperature", "1.0", "--template", "raw", "--dtype",
            "float32", "--max-prompt-tokens", "8", "--max-response-tokens", "24",
            "--kv-cache-bytes", "67108864", "--out", str(out),
        ],
        1800.0,
    )  # fmt: skip
    [scores] = list(out.glob("*.json"))
    return 100 * _find(json.loads(scores.read_text()), "avg_at_k")


def _find(value: Any, key: str) -> float:
    if isinstance(value, dict):
        if key in value:
            return float(value[key])
        value = list(value.values())
    for one in value if isinstance(value, list) else []:
        if isinstance(one, dict | list):
            return _find(one, key)
    raise KeyError(key)


def main() -> None:
    """Both, and a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps
    rows, measured = [], {}
    with TemporaryDirectory() as folder:
        start = accuracy(EXAMPLE / "base", Path(folder) / "start")
        for name, side in (("pnpo_megatron", ours), ("TRL 1.16", theirs)):
            out = Path(folder) / side.__name__
            found = side(out, steps)
            reached = accuracy(found["model"], Path(folder) / f"{side.__name__}_scores")
            measured[name] = row = {
                "trainer": name,
                "seconds an update": found["seconds"] / found["updates"],
                "generated tokens/s": found["generated"] / found["seconds"],
                "trained tokens/s": 4 * found["generated"] / found["seconds"],
                "peak GB": found["peak"] / 1e9,
                "CPU minutes": found["cpu"] / 60,
                "held-out %, from": start,
                "to": reached,
                "points a CPU minute": (reached - start) / (found["cpu"] / 60),
            }
            rows.append(row)
    mine, peer = measured["pnpo_megatron"], measured["TRL 1.16"]
    bounds = [
        Bound("seconds an update over TRL's", mine["seconds an update"] / peer["seconds an update"], 1.0),
        Bound("peak memory over TRL's", mine["peak GB"] / peer["peak GB"], 1.0),
        Bound("TRL's points a CPU minute over ours",
              peer["points a CPU minute"] / max(mine["points a CPU minute"], 1e-9), 1.0),
    ]  # fmt: skip
    report("peers", rows, bounds)


if __name__ == "__main__":
    main()
