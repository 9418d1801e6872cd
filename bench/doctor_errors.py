"""What `pnpo-megatron doctor` plans against what is measured here: bytes of tiny models, parameters.

    PYTHONPATH=.:tests OMP_NUM_THREADS=1 python bench/doctor_errors.py [--out FOLDER]

Two layers of a Qwen2 and of a Qwen3-MoE make one update on two processes under every layout of
tests/doctor_checks.py. Weights, gradients, optimizer state and bytes given to collectives are of both ranks
together, activations those of the first micro-batch; an error is a share of what was measured. Parameters are
those of the shipped models, by the family's table and by transformers on the meta device.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import doctor_checks as checks
from measure import Bound, Row, on_ranks, options, report

MODELS = Path(__file__).parents[1] / "examples" / "models"
STATE = ("weights", "gradients", "optimizer")
LIMIT = 0.15
"""What is promised of activations; all else is exact."""


def error(planned: float, measured: float) -> float:
    """Relative to what was measured."""
    return abs(planned - measured) / measured if measured else float(planned != measured)


def compare(folder: Path, layout: checks.Options, ranks: checks.Ranks) -> tuple[Row, dict[str, float]]:
    """Bytes, planned / measured, and the largest error of each part over ranks, groups and operations."""
    row: Row = {}
    errors: dict[str, float] = {}
    planned = [checks.planned_state(folder, layout, rank) for rank in range(len(ranks))]
    for part in STATE:
        pairs = [(getattr(a, part), getattr(b["state"], part)) for a, b in zip(planned, ranks, strict=True)]
        row[part] = _both(sum(a for a, _ in pairs), sum(b for _, b in pairs))
        errors[part] = max(error(*pair) for pair in pairs)
    sent, counted = checks.planned_traffic(folder, layout, ranks), checks.counted_traffic(ranks)
    row["sent"] = _both(sent.total(), counted.total())
    errors["sent"] = max(error(sent[key], counted[key]) for key in sent | counted)
    row |= {"activations": "", "error": ""}
    if ranks[0]["saved"] is not None:  # a later pipeline stage has no input of its own
        planned_saved, saved = checks.planned_saved(folder, layout, ranks), sum(one["saved"] for one in ranks)
        row["activations"], row["error"] = _both(planned_saved, saved), f"{planned_saved / saved - 1:+.1%}"
        errors["activations"] = error(planned_saved, saved)
    return row, errors


def _both(planned: float, measured: float) -> str:
    return f"{planned:,.0f} / {measured:,.0f}"


def bytes_of_tiny_models(folder: Path) -> tuple[list[Row], list[Bound]]:
    """One row a layout; exact parts are judged over all of them, activations one by one."""
    cases = checks.make_cases(folder)
    ranks = on_ranks(checks.measure_all, checks.RANKS, cases, timeout_s=600.0)
    rows: list[Row] = []
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        row, found[name] = compare(*case, [rank[name] for rank in ranks])
        rows.append({"layout": name} | row)
    bounds = [
        Bound(f"{part}: largest error of {len(found)} layouts", max(one[part] for one in found.values()), 0)
        for part in (*STATE, "sent")
    ]
    return rows, bounds + [
        Bound(f"activations, {name}: error", one["activations"], LIMIT)
        for name, one in found.items()
        if "activations" in one
    ]


def parameters() -> tuple[list[Row], list[Bound]]:
    """One row a shipped model."""
    rows = [
        {
            "model": config.parent.name,
            "planned": checks.planned_parameters(config),
            "transformers": checks.parameters_on_meta(config),
        }
        for config in sorted(MODELS.glob("*/config.json"))
    ]
    worst = max(error(row["planned"], row["transformers"]) for row in rows)
    return rows, [Bound(f"parameters: largest error of {len(rows)} models", worst, 0)]


def main() -> None:
    """Both tables."""
    args = options(__doc__).parse_args()
    report("doctor_parameters", *parameters(), out=args.out)
    with tempfile.TemporaryDirectory() as folder:
        report("doctor_errors", *bytes_of_tiny_models(Path(folder)), out=args.out)


if __name__ == "__main__":
    main()
