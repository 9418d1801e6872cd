"""The ablations of the objective one token at a time, in Python floats; shares nothing with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

GATES = {"gate_low": 0.02, "gate_high": 0.03}
ABLATIONS: dict[str, dict] = {
    "tempered": {"weight": "tempered", "alpha": 0.6, **GATES},
    "flat gate": {"gate": "flat", **GATES},
    "no gate": {"gate": "none"},
    "renormalised": {"renormalise": True, **GATES},
    "renormalised token mean": {"renormalise": True, "mean": "token", **GATES},
    "prefix score": {"score": "prefix", **GATES},
    "exact": {"weight": "cumulative", "gate": "none", "score": "prefix", "mean": "token"},
    "all at once": {
        "weight": "tempered", "alpha": 0.9, "gate": "flat", "score": "prefix", "renormalise": True, **GATES,
    },
}  # fmt: skip
"""Overrides of the preset "pnpo"."""


def weights(ratios: Sequence[float], how: dict) -> list[tuple[float, bool]]:
    """(w_t, kept) of one response."""
    length, found = len(ratios), []
    for t in range(1, length + 1):
        total = math.fsum(ratios[:t])
        name = how.get("weight", "prefix")
        log_weight = {"prefix": total / t, "cumulative": total, "tempered": total / t ** how.get("alpha", 1)}[
            name
        ]
        reach = {"sqrt": math.sqrt(length / t), "flat": 1.0, "none": math.inf}[how.get("gate", "sqrt")]
        excess = math.expm1(log_weight)
        kept = reach == math.inf or -how["gate_low"] * reach <= excess <= how["gate_high"] * reach
        found.append((math.exp(log_weight), kept))
    return found


def slopes(batch: Sequence[tuple[Sequence[float], float]], how: dict) -> list[list[float]]:
    """d loss / d log pi of every token of a whole mini-batch of (log-ratios, advantage)."""
    decided = [weights(ratios, how) for ratios, _ in batch]
    if how.get("renormalise"):
        counts = [sum(kept for _, kept in row) for row in decided]
    else:
        counts = [len(row) for row in decided]
    responses, tokens = sum(count > 0 for count in counts), sum(counts)
    result = []
    for (_, advantage), row, count in zip(batch, decided, counts, strict=True):
        share = 1 / tokens if how.get("mean") == "token" else 1 / (responses * count) if count else 0.0
        terms = [-share * advantage * weight if kept else 0.0 for weight, kept in row]
        if how.get("score") == "prefix":
            terms = [math.fsum(terms[t:]) for t in range(len(terms))]
        result.append(terms)
    return result
