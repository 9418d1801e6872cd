"""Reference figures of PNPO at 15,360 tokens, in plain NumPy: ``python tests/golden/make_numbers.py``.

Log-ratios are independent normal noise, a stand-in for a drifted policy. Seeds and the order of draws are
fixed, because the figures belong to these draws. Nothing here is shared with the package.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LENGTH, SIGMA = 15_360, 0.05
LOW, HIGH = 7e-4, 9.5e-4
NUMBERS = Path(__file__).with_name("numbers.json")

Array = NDArray[np.float64]


def noise_rows(rows: int = 400) -> Array:
    """[rows, LENGTH] zero-mean log-ratios."""
    return np.random.default_rng(0).normal(0.0, SIGMA, (rows, LENGTH))


def single_responses() -> tuple[Array, Array, Array]:
    """Log-ratios of a response that drifts by 0.05 a token; old and new log-probs of one that does not."""
    rng = np.random.default_rng(7)
    rng.normal(0.0, 0.02, 64)
    drift = 0.05 + rng.normal(0.0, 0.05, LENGTH)
    old = rng.normal(-1.5, 0.4, LENGTH)
    return drift, old, old + rng.normal(0.0, 0.05, LENGTH)


def make_numbers() -> dict[str, float]:
    """All figures, by the formulas of the paper written out."""
    position = np.arange(1, LENGTH + 1)
    scale = np.sqrt(LENGTH / position)
    drift, old, new = single_responses()
    with np.errstate(over="ignore"):
        overflow32 = int(np.argmax(np.isinf(np.cumprod(np.exp(drift).astype(np.float32)))))
        overflow64 = int(np.argmax(np.isinf(np.cumprod(np.exp(drift)))))
    weight = np.exp(np.cumsum(new - old) / position)
    keep = (weight >= 1 - LOW * scale) & (weight <= 1 + HIGH * scale)
    rows = np.exp(np.cumsum(noise_rows(), axis=1) / position)
    scheduled = ((rows >= 1 - LOW * scale) & (rows <= 1 + HIGH * scale)).mean(axis=0)
    flat = ((rows >= 1 - LOW) & (rows <= 1 + HIGH)).mean(axis=0)
    return {
        "overflow_index_float32": overflow32,
        "overflow_index_float64": overflow64,
        "prefix_mean_at_end": float(np.exp(drift.sum() / LENGTH)),
        "kept_fraction": float(keep.mean()),
        "coefficient_sum": float((keep * weight).sum() / LENGTH),
        "coefficient_sum_renormalised": float((keep * weight).sum() / keep.sum()),
        "scheduled_acceptance_min": float(scheduled.min()),
        "scheduled_acceptance_max": float(scheduled.max()),
        "flat_acceptance_first": float(flat[0]),
        "flat_acceptance_last": float(flat[-1]),
    }


if __name__ == "__main__":
    NUMBERS.write_text(json.dumps(make_numbers(), indent=1) + "\n")
