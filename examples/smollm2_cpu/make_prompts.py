"""Writes one-digit sums and products: data/prompts.jsonl for training, data/heldout.jsonl for evaluation.

    python make_prompts.py

The two files share no problem, a+b and b+a counting as one, and neither holds the two problems that
worked_turns.jinja works out: without worked turns the model ends no reply in a box, and every reward is 0.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKED = {("+", 3, 4), ("*", 2, 6)}


def make_problems(heldout: int, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows: `heldout` unordered pairs, half of them sums, go to the second list."""
    rng = random.Random(seed)
    training: list[dict[str, str]] = []
    held: list[dict[str, str]] = []
    for sign, answer in (("+", int.__add__), ("*", int.__mul__)):
        pairs = [(a, b) for a in range(1, 10) for b in range(a, 10) if (sign, a, b) not in WORKED]
        rng.shuffle(pairs)
        for index, (a, b) in enumerate(pairs):
            rows = [{"id": f"{x}{sign}{y}", "problem": f"What is {x} {sign} {y}?",
                     "answer": str(answer(x, y))}
                    for x, y in sorted({(a, b), (b, a)})]
            (held if index < heldout // 2 else training).extend(rows)
    return training, held


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument("--heldout", type=int, default=24, help="unordered pairs kept for evaluation")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    training, held = make_problems(args.heldout, args.seed)
    for name, rows in (("prompts", training), ("heldout", held)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"prompts: {len(training)} for training, {len(held)} held out, in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
