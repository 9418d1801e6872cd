"""What the report draws, taken from metrics rows: plain numbers, no plotting."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from pnpo_megatron.algorithm.diagnostics import BINS
from pnpo_megatron.analysis.run_folder import Row, RunFolder, number
from pnpo_megatron.analysis.token_dump import TokenDump

TIMERS = ("generate", "reward", "logprobs", "update", "sync")
"""Parts of a step; all but `update` stand on the step's first row."""
LONGEST = 400
"""Points of a line; a longer one is drawn by the means of neighbours."""


@dataclass(frozen=True)
class Line:
    """One curve; `spread` is a half-width around it."""

    color: int
    """Index of the run, so that it has one colour on the whole page."""
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None


@dataclass(frozen=True)
class Spread:
    """Quantiles of w - 1 by t/L for one epoch, and the gate's tolerances if it is a band."""

    label: str
    position: list[float]
    """Middle of each bin of t/L."""
    quantiles: dict[float, list[float]]


def curve(color: int, rows: Iterable[Row], key: str) -> Line:
    """A metric against updates; rows without it are left out."""
    points = [(float(row["update"]), value) for row in rows if (value := number(row, key)) is not None]
    return thinned(Line(color, [x for x, _ in points], [y for _, y in points]))


def scores(color: int, run: RunFolder, key: str, error: str) -> Line:
    """An evaluation score against updates, with its standard error if every evaluation has one."""
    rows = [row for row in run.evals if number(row, key) is not None]
    errors = [value for row in rows if (value := number(row, error)) is not None]
    return Line(
        color,
        [float(row["update"]) for row in rows],
        [float(row[key]) for row in rows],
        errors if len(errors) == len(rows) else None,
    )


def step_ends(run: RunFolder) -> list[Row]:
    """The last update row of every step, where the lag is largest."""
    return [rows[-1] for rows in run.steps.values()]


def thinned(line: Line) -> Line:
    """At most `LONGEST` points, each the mean of as many neighbours."""
    width = -(-len(line.x) // LONGEST)
    if width <= 1:
        return line
    cuts = range(0, len(line.x), width)
    return Line(
        line.color,
        [fmean(line.x[start : start + width]) for start in cuts],
        [fmean(line.y[start : start + width]) for start in cuts],
    )


def by_lag(color: int, rows: Sequence[Row], key: str) -> Line:
    """Mean of a metric over the updates with the same lag (updates since the batch was sampled)."""
    found: dict[float, list[float]] = {}
    for row in rows:
        lag, value = number(row, "lag"), number(row, key)
        if lag is not None and value is not None:
            found.setdefault(lag, []).append(value)
    lags = sorted(found)
    return thinned(Line(color, lags, [fmean(found[lag]) for lag in lags]))


def rejected_by_epoch_and_position(run: RunFolder) -> list[list[float | None]]:
    """Mean rejected fraction by epoch (rows, from 1) and tenth of the response, over all updates."""
    epochs = sorted({int(row["epoch"]) for row in run.updates})
    by_epoch = [[row for row in run.updates if row["epoch"] == epoch] for epoch in epochs]
    keys = [f"gate/rejected_fraction_bin_{index}" for index in range(BINS)]
    return [[_mean(rows, key) for key in keys] for rows in by_epoch]


def seconds_by_part(run: RunFolder) -> dict[str, list[float]]:
    """Seconds of each timer in every step; a timer that is missing counts as 0."""
    return {
        name: [sum(number(row, f"time/{name}_s") or 0.0 for row in rows) for rows in run.steps.values()]
        for name in TIMERS
    }


def weight_spread(dumps: Sequence[TokenDump], bins: int = 20) -> list[Spread]:
    """Quantiles of w - 1 against t/L, one entry an epoch of the newest dumped step."""
    newest = max((dump.step for dump in dumps), default=0)
    spreads = []
    for epoch in sorted({dump.epoch for dump in dumps if dump.step == newest}):
        parts = [dump for dump in dumps if (dump.step, dump.epoch) == (newest, epoch)]
        excess = torch.cat([torch.expm1(dump.log_weight) for dump in parts])
        place = torch.cat([dump.arrays["position"].double() / dump.arrays["length"] for dump in parts])
        spreads.append(_quantiles(f"step {newest}, epoch {epoch}", excess, place, bins))
    return spreads


def _quantiles(label: str, excess: Tensor, place: Tensor, bins: int) -> Spread:
    levels = (0.05, 0.5, 0.95)
    index = (place * bins).ceil().long().clamp(1, bins) - 1
    filled = [number for number in range(bins) if (index == number).any()]
    columns = {
        level: [float(excess[index == number].quantile(level)) for number in filled] for level in levels
    }
    return Spread(label, [(number + 0.5) / bins for number in filled], columns)


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [value for row in rows if (value := number(row, key)) is not None]
    return fmean(values) if values else None
