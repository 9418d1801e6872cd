"""How much of the packed micro-batches is padding, and how long ranks wait for the fullest one.

    PYTHONPATH=. python bench/packing.py [--run FOLDER ...] [--out FOLDER]

Lengths: rollouts that the CPU examples once stored (stored_lengths.json), those of the runs that are named,
and drawn ones up to 15,360 tokens. `padding` is the share of slots that hold no token; `idle` the share, over
the update, that the fullest rank keeps the others waiting; `of fewest` how many micro-batches there are over
the fewest possible.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from measure import Bound, Row, options, report

from pnpo_megatron.data.partition import Layout, plan_micro_batches

RESPONSES, PROMPT, LIMIT = 512, 150, 15_360
STORED = Path(__file__).parent / "stored_lengths.json"
SPLITS = ((32, 1, 1), (16, 2, 1), (8, 2, 2), (4, 8, 1))
"""(data, context, tensor) on 32 ranks."""


def stored_lengths(run: Path) -> list[int]:
    """Tokens of every stored sequence of a run, prompt included."""
    from safetensors import safe_open

    lengths: list[int] = []
    for path in sorted(run.glob("rollouts/*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            lengths += file.get_tensor("lengths").tolist()
    return lengths


def heavy_tailed(count: int, seed: int = 1) -> list[int]:
    """Log-normal, median 2,500, every tenth or so cut off at the limit."""
    draw = random.Random(seed)
    return [PROMPT + min(LIMIT, max(16, round(draw.lognormvariate(7.8, 1.2)))) for _ in range(count)]


def uniform(count: int, seed: int = 1) -> list[int]:
    """Any length up to the limit."""
    draw = random.Random(seed)
    return [PROMPT + draw.randint(16, LIMIT) for _ in range(count)]


def measure(name: str, lengths: Sequence[int], split: tuple[int, int, int], max_tokens: int) -> Row:
    """One plan in numbers."""
    data, context, tensor = split
    layout = Layout(max_tokens // context, data, context, tensor)
    plan = plan_micro_batches(lengths, layout)
    loads = [[sum(layout.pad(lengths[row]) for row in rows) for rows in rank] for rank in plan]
    assert all(load <= layout.capacity for rank in loads for load in rank), "a micro-batch broke the budget"
    padded, fullest = sum(map(sum, loads)), max(map(sum, loads))
    count = len(plan[0])
    fewest = -(-sum(layout.pad(length) for length in lengths) // (layout.capacity * data))
    return {
        "lengths": name,
        "data x context x tensor": " x ".join(map(str, split)),
        "micro-batches a rank": count,
        "of fewest": count / fewest,
        "padding": 1 - sum(lengths) / padded,
        "idle": 1 - padded / (fullest * data),
    }


def main() -> None:
    """One row for each distribution and split."""
    parser = options(__doc__)
    parser.add_argument("--run", type=Path, nargs="+", default=[], help="folders of runs, rollouts kept")
    args = parser.parse_args()
    rows = []
    for name, lengths in (("heavy-tailed", heavy_tailed(RESPONSES)), ("uniform", uniform(RESPONSES))):
        rows += [measure(name, lengths, split, 16_384) for split in SPLITS]
    stored = json.loads(STORED.read_text()) | {run.name: stored_lengths(run) for run in args.run}
    rows += [measure(f"stored by {name}", some[:RESPONSES], (2, 1, 1), 1024) for name, some in stored.items()]
    bounds = [
        Bound(f"{row['lengths']}, {row['data x context x tensor']}: padding", row["padding"], 0.03)
        for row in rows
    ]
    report("packing", rows, bounds, out=args.out)


if __name__ == "__main__":
    main()
