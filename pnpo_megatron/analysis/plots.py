"""Plots as SVG whose colours are CSS variables, so that one picture serves light and dark pages.

Matplotlib writes every colour as a hex number. The ones used here are place-holders that occur nowhere
else; they are replaced by ``var(--...)`` at the end. The only file that imports Matplotlib.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure

from pnpo_megatron.algorithm.diagnostics import BINS
from pnpo_megatron.analysis.series import Line, Spread

INK, FAINT = "#010203", "#010204"
SERIES = tuple(f"#0a0b{index:02x}" for index in range(8))
_VARIABLES = {INK: "--ink", FAINT: "--faint"} | {color: f"--s{i}" for i, color in enumerate(SERIES)}
_STYLE = matplotlib.rc_params_from_file(Path(__file__).parent / "plots.mplstyle", use_default_template=False)
WIDTH, HEIGHT = 4.6, 2.7
"""Inches; small, because a phone shows a plot at about this size."""


def line_plot(name: str, lines: Sequence[Line], *, x: str, y: str, marker: str = "") -> str:
    """Curves, one colour a run, with bands of +- `spread`; `name` must be unique on the page."""

    def draw(axes: Any) -> None:
        for line in lines:
            color = SERIES[line.color % len(SERIES)]
            axes.plot(line.x, line.y, color=color, marker=marker or None, markersize=3)
            if line.spread is not None:
                low = [value - half for value, half in zip(line.y, line.spread, strict=True)]
                high = [value + half for value, half in zip(line.y, line.spread, strict=True)]
                axes.fill_between(line.x, low, high, color=color, alpha=0.2, linewidth=0)
        axes.set(xlabel=x, ylabel=y)

    return _svg(name, draw)


def stack_plot(name: str, steps: Iterable[int], parts: Mapping[str, Sequence[float]]) -> str:
    """Seconds of every step, its parts on top of each other."""

    def draw(axes: Any) -> None:
        edges = [step + side for step in steps for side in (-0.5, 0.5)]
        heights = [[seconds for seconds in part for _ in range(2)] for part in parts.values()]
        axes.stackplot(
            edges, heights, labels=list(parts), colors=SERIES[: len(parts)], alpha=0.85, linewidth=0
        )
        axes.set(xlabel="step", ylabel="seconds", ylim=(0, None))
        axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.27))

    return _svg(name, draw, top=0.5)


def heat_map(name: str, fraction: Sequence[Sequence[float | None]]) -> str:
    """Rejected fraction, epoch against position; every cell says its percentage."""
    tint = LinearSegmentedColormap.from_list("tint", [(*to_rgb(SERIES[1]), 0.0), (*to_rgb(SERIES[1]), 0.9)])

    def draw(axes: Any) -> None:
        rows = [[value or 0.0 for value in row] for row in fraction]
        top = max((value for row in rows for value in row), default=0.0)
        axes.pcolormesh(rows, cmap=tint, vmin=0.0, vmax=top or 1.0)
        for epoch, row in enumerate(fraction):
            for place, value in enumerate(row):
                text = "-" if value is None else f"{100 * value:.3g}"
                axes.text(place + 0.5, epoch + 0.5, text, ha="center", va="center", fontsize=8)
        axes.grid(False)
        axes.set_xticks(range(BINS + 1), [f"{index / BINS:g}" for index in range(BINS + 1)])
        axes.set_yticks([epoch + 0.5 for epoch in range(len(rows))], range(1, len(rows) + 1))
        axes.set(xlabel="position t / L", ylabel="epoch")

    return _svg(name, draw, height=0.68 + 0.34 * max(len(fraction), 1))


def spread_plot(name: str, spreads: Sequence[Spread], tolerances: tuple[float, float] | None) -> str:
    """5 to 95 % of w - 1 against t/L, one tint an epoch, inside the gate's +- sqrt(L/t) band."""

    def draw(axes: Any) -> None:
        for spread, color in zip(spreads, SERIES, strict=False):
            low, middle, high = (spread.quantiles[level] for level in sorted(spread.quantiles))
            axes.fill_between(spread.position, low, high, color=color, alpha=0.18, linewidth=0)
            axes.plot(spread.position, middle, color=color, label=spread.label)
        if tolerances is not None:
            place = [(index + 1) / 100 for index in range(100)]
            for side, tolerance in zip((-1, 1), tolerances, strict=True):
                label = "gate" if side > 0 else None
                edge = [side * tolerance / share**0.5 for share in place]
                axes.plot(place, edge, color=INK, linestyle="--", linewidth=1.0, label=label)
        axes.set(xlabel="position t / L", ylabel="w - 1")
        axes.legend()

    return _svg(name, draw, height=3.2)


def _svg(name: str, draw: Any, height: float = HEIGHT, top: float = 0.2) -> str:
    """Draw into a figure of its own and give the SVG element, without prolog, for use inside HTML;
    `height` and the margin at the `top` are in inches."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name, "svg.id": name}):
        figure = Figure(figsize=(WIDTH, height))
        figure.subplots_adjust(  # fixed, because measuring every label doubles the time
            left=0.72 / WIDTH, right=1 - 0.1 / WIDTH, bottom=0.48 / height, top=1 - top / height
        )
        draw(figure.add_subplot())
        text = io.StringIO()
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=unsaid)
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return re.sub(r'<g id="[^"]*">', "<g>", svg)  # ids of groups would clash between pictures
