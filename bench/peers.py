"""The arithmetic example through TRL 1.16's GRPOTrainer (num_iterations = 4) and through this product.

    PYTHONPATH=. .venv/bin/python bench/peers.py [--steps 5] [--threads 1] [--out FOLDER]

Same model, prompts, rewards, temperature, learning rate, grpo objective, number of updates and threads a
process. TRL generates with transformers, which is what it does without a vLLM server. Both final models are
scored by `pnpo-megatron eval`. CPU time is of the whole process tree, start-up included; seconds an update
are of the loop alone, sampling included.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from measure import Bound, Row, options, report

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic_cpu"
RESPONSES, EPOCHS = 512, 4


def tree_bytes(pid: int) -> int:
    """Resident bytes of a process and all below it; a page that several share counts once."""
    total, pending = 0, [pid]
    while pending:
        one = pending.pop()
        try:
            sizes = Path(f"/proc/{one}/smaps_rollup").read_text()
            total += 1024 * int(sizes.split("\nPss:", 1)[1].split(maxsplit=1)[0])
            for task in Path(f"/proc/{one}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError, IndexError):  # it has ended
            continue
    return total


def run(command: list[str], threads: int) -> Row:
    """Wall and CPU seconds, and peak resident memory of the whole tree."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, cwd=EXAMPLE, env=environment, stdout=subprocess.DEVNULL)
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(2.0):
            peak = max(peak, tree_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = process.wait(1800.0)
    finally:
        process.kill()
        done.set()
        watcher.join()
    if code:
        raise RuntimeError(f"exit code {code} of {' '.join(command)}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": time.perf_counter() - start, "cpu": cpu, "peak": peak}


def ours(out: Path, steps: int, threads: int) -> Row:
    """This product; seconds and tokens from its own rows."""
    settings = (EXAMPLE / "config.toml").read_text().splitlines()
    config = out.with_suffix(".toml")  # pnpo's tolerances are no settings of grpo
    config.write_text("\n".join(line for line in settings if not line.startswith("gate_")) + "\n")
    used = run(
        [
            str(ROOT / ".venv/bin/pnpo-megatron"), "train", str(config), f"--steps={steps}",
            f"--run.folder={out}", "--objective.name=grpo", "--objective.epochs=4", "--eval.benchmarks=[]",
            "--checkpoint.every=0", f"--rollout.threads={threads}",
        ],
        threads,
    )  # fmt: skip
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "update"]
    timers = ("generate_s", "reward_s", "logprobs_s", "update_s", "sync_s")
    spent = {name: sum(row.get(f"time/{name}", 0.0) for row in rows) for name in timers}
    [model] = (out / "hf").iterdir()
    return {
        **used,
        "seconds": sum(spent.values()),
        "sampling": spent["generate_s"],
        "updating": spent["update_s"],
        "updates": len(rows),
        "generated": sum(row.get("response/length_mean", 0.0) for row in rows) * RESPONSES,
        "model": model,
    }


def theirs(out: Path, steps: int, threads: int) -> Row:
    """TRL."""
    out.mkdir()
    command = [str(ROOT / ".venv-bench/bin/python"), str(ROOT / "bench/peers_trl.py"), str(EXAMPLE), str(out)]
    used = run([*command, str(steps)], threads)
    return {**used, **json.loads((out / "result.json").read_text()), "model": out / "hf"}


def accuracy(model: Path, out: Path) -> float:
    """Avg@4 on the held-out sums, in percent."""
    run(
        [
            str(ROOT / ".venv/bin/pnpo-megatron"), "eval", "--model", str(model), "--benchmark",
            "data/heldout.jsonl", "--samples", "4", "--temperature", "1.0", "--template", "raw", "--dtype",
            "float32", "--max-prompt-tokens", "8", "--max-response-tokens", "24",
            "--kv-cache-bytes", "67108864", "--out", str(out),
        ],
        1,
    )  # fmt: skip
    [scores] = list(out.glob("*.json"))
    return 100 * json.loads(scores.read_text())["macro"]["mean"]


def main() -> None:
    """Both, and a table."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        start = accuracy(EXAMPLE / "base", Path(folder) / "start")
        for name, side in (("pnpo_megatron", ours), ("TRL 1.16", theirs)):
            found = side(Path(folder) / side.__name__, arguments.steps, arguments.threads)
            reached = accuracy(found["model"], Path(folder) / f"{side.__name__}_scores")
            rows.append({"trainer": name, **figures(found, start, reached)})
    bounds = [Bound(what, ratio, 1.0) for what, ratio in ratios(*rows).items()]
    report("peers", rows, bounds, out=arguments.out)


def figures(found: Row, start: float, reached: float) -> Row:
    """A row of the table."""
    minutes = found["cpu"] / 60
    return {
        "seconds an update": found["seconds"] / found["updates"],
        "generated tokens/s of sampling": found["generated"] / found["sampling"],
        "trained tokens/s of updates": EPOCHS * found["generated"] / found["updating"],
        "peak GB": found["peak"] / 1e9,
        "CPU minutes": minutes,
        "held-out %, from": start,
        "to": reached,
        "points a CPU minute": (reached - start) / minutes,
    }


def ratios(mine: Row, peer: Row) -> dict[str, float]:
    """Ours against TRL's, each so that below 1 is better."""
    found = {f"{name}, ours over TRL's": mine[name] / peer[name] for name in ("seconds an update", "peak GB")}
    more = ("generated tokens/s of sampling", "trained tokens/s of updates", "points a CPU minute")
    return found | {f"{name}, TRL's over ours": peer[name] / max(mine[name], 1e-9) for name in more}


if __name__ == "__main__":
    main()
