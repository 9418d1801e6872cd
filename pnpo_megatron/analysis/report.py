"""``pnpo-megatron report RUN [RUN ...]``: one self-contained HTML page, also while a run is going."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pnpo_megatron.algorithm import objective_settings
from pnpo_megatron.algorithm.presets import OBJECTIVE_KEYS
from pnpo_megatron.analysis import page, plots
from pnpo_megatron.analysis.run_folder import RunFolder, last, read_run
from pnpo_megatron.analysis.series import (
    Line,
    by_lag,
    curve,
    rejected_by_epoch_and_position,
    scores,
    seconds_by_part,
    step_ends,
    weight_spread,
)
from pnpo_megatron.analysis.token_dump import read_tokens
from pnpo_megatron.durable import write_text_whole
from pnpo_megatron.errors import DONE


def main(words: Sequence[str]) -> int:
    """Write the page and print where it is.

    Raises:
        DataError: a folder without metrics.
    """
    parser = argparse.ArgumentParser(prog="pnpo-megatron report")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; several are compared")
    parser.add_argument("--out", type=Path, help="the page to write (default: report.html in the first run)")
    arguments = parser.parse_args(words)
    runs = [read_run(path) for path in arguments.runs]
    out: Path = arguments.out or runs[0].path / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text_whole(out, build_page(runs))
    print(out)
    return DONE


def build_page(runs: Sequence[RunFolder]) -> str:
    """The whole document."""
    names = labels(runs)
    title = ", ".join(names)
    parts = [
        page.heading(title, level=1),
        page.legend([f"{name}: {state(run)}" for name, run in zip(names, runs, strict=True)]),
        page.grid(shared_figures(runs)),
    ]
    for index, (name, run) in enumerate(zip(names, runs, strict=True)):
        figures = run_figures(run, index)
        if figures:
            parts += [page.heading(name), page.grid(figures)]
    parts += [page.heading("Newest values"), newest_values(runs, names)]
    parts += [page.heading("Evaluations"), evaluations(runs, names)]
    parts += [page.heading("Settings that differ"), differences(runs, names)]
    return page.page(f"pnpo-megatron: {title}", parts)


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """Folder names where they tell the runs apart, whole paths otherwise."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def state(run: RunFolder) -> str:
    """How far a run is."""
    if not run.updates:
        return "no update yet"
    newest = run.updates[-1]
    skipped = sum(bool(row.get("update/skipped")) for row in run.updates)
    planned = run.setting("steps")
    of = f" of {planned}" if planned else ""
    return f"step {newest['step']}{of}, update {newest['update']}, {skipped} skipped"


def shared_figures(runs: Sequence[RunFolder]) -> list[str]:
    """Plots in which all runs are compared, against updates: a matched budget is one of updates."""
    figures: list[str] = []

    def add(
        name: str, caption: str, y: str, lines: Iterable[Line], x: str = "update", marker: str = ""
    ) -> None:
        drawn = [line for line in lines if line.x]
        if drawn:
            figures.append(page.figure(caption, plots.line_plot(name, drawn, x=x, y=y, marker=marker)))

    def each(key: str) -> Iterable[Line]:
        return (curve(color, run.updates, key) for color, run in enumerate(runs))

    def at_step_ends(key: str) -> Iterable[Line]:
        return (curve(color, step_ends(run), key) for color, run in enumerate(runs))

    def scored(key: str, error: str) -> Iterable[Line]:
        return (scores(color, run, key, error) for color, run in enumerate(runs))

    def lagged(key: str) -> Iterable[Line]:
        return (by_lag(color, run.updates, key) for color, run in enumerate(runs))

    add("reward", "Mean reward of each rollout batch", "reward", each("reward/mean"))
    macro = scored("eval/macro", "eval/macro_stderr")
    add("macro", "Evaluation, mean of benchmarks; band: one standard error", "score", macro, marker="o")
    for index, name in enumerate(benchmarks(runs)):
        lines = scored(f"eval/{name}/avg_at_k", f"eval/{name}/stderr")
        add(f"bench{index}", f"Evaluation on {name}; band: one standard error", "Avg@k", lines, marker="o")
    lag = "lag: updates since the batch was sampled"
    rejected, spread = lagged("gate/rejected_fraction"), lagged("log_ratio/std")
    add("rejected-lag", "Rejected fraction by policy lag, mean over steps", "fraction", rejected, lag, "o")
    add("spread-lag", "Spread of log-ratios by policy lag, mean over steps", "nats", spread, lag, "o")
    rejected = at_step_ends("gate/rejected_fraction")
    add("rejected", "Rejected fraction of the last update of each step", "fraction", rejected)
    add("lag", "Policy lag of the last update of each step", "updates", at_step_ends("lag"))
    add("length", "Mean response length", "tokens", each("response/length_mean"))
    truncated = each("response/truncated_fraction")
    add("truncated", "Responses cut at the length limit", "fraction", truncated)
    add("entropy", "Entropy of the policy", "nats", each("entropy"))
    gap = each("mismatch/mean_abs")
    add("mismatch", "Learner against sampler, same weights: mean |difference|", "nats", gap)
    return figures


def run_figures(run: RunFolder, index: int) -> list[str]:
    """Plots that only make sense for one run."""
    if not run.updates:
        return []
    heat = plots.heat_map(f"heat{index}", rejected_by_epoch_and_position(run))
    stack = plots.stack_plot(f"stack{index}", run.steps, seconds_by_part(run))
    figures = [
        page.figure("Rejected tokens in per cent, by epoch and position; mean over all updates", heat),
        page.figure("Seconds of each step", stack),
    ]
    spreads = weight_spread(read_tokens(run.path))
    if spreads:
        picture = plots.spread_plot(f"spread{index}", spreads, band(run))
        figures.append(page.figure("Weights by position: 5 %, 50 % and 95 %, and the gate", picture))
    return figures


def band(run: RunFolder) -> tuple[float, float] | None:
    """The gate's tolerances if it is the sqrt(L/t) band."""
    section: dict[str, Any] = run.setting("objective") or {}
    settings = objective_settings(
        section.get("name", "pnpo"), **{key: section.get(key) for key in OBJECTIVE_KEYS}
    )
    if settings["gate"] != "sqrt" or settings.get("gate_reference_length"):
        return None
    return settings["gate_low"], settings["gate_high"]


def newest_values(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    """The newest logged value of every metric, one column a run, exactly as metrics.jsonl has it."""
    logged = (row for run in runs for row in (*run.updates, *run.evals))
    keys = dict.fromkeys(key for row in logged for key in row if "_bin_" not in key)
    rows = [
        [key, *(last(run.evals if key.startswith("eval/") else run.updates, key) for run in runs)]
        for key in keys
    ]
    return page.table("newest", ["metric", *names], [row for row in rows if set(row[1:]) != {None}])


def evaluations(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    """Every evaluation of every run."""
    keys = [f"eval/{name}/{part}" for name in benchmarks(runs) for part in ("avg_at_k", "stderr")]
    keys += ["eval/macro", "eval/macro_stderr"]
    rows = [
        [name, row["step"], row["update"], *(row.get(key) for key in keys)]
        for name, run in zip(names, runs, strict=True)
        for row in run.evals
    ]
    if not rows:
        return page.paragraph("No evaluation yet.")
    return page.table(
        "evaluations", ["run", "step", "update", *(key.removeprefix("eval/") for key in keys)], rows
    )


def differences(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    """Settings on which the runs do not agree; their folders always differ and are left out."""
    if len(runs) < 2:
        return page.paragraph("One run; nothing to compare.")
    flat = [dict(flatten(run.config)) for run in runs]
    keys = sorted({key for settings in flat for key in settings} - {"run.folder"})
    rows = [[key, *(settings.get(key) for settings in flat)] for key in keys]
    rows = [row for row in rows if any(value != row[1] for value in row[2:])]
    return page.table("settings", ["setting", *names], rows) if rows else page.paragraph("None.")


def flatten(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """``section.key`` and value; lists are shown as they stand."""
    pairs: list[tuple[str, object]] = []
    for key, value in settings.items():
        pairs += flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return pairs


def benchmarks(runs: Sequence[RunFolder]) -> list[str]:
    """Names of all benchmarks of all runs."""
    keys = {key for run in runs for row in run.evals for key in row if key.endswith("/avg_at_k")}
    return sorted(key.removeprefix("eval/").removesuffix("/avg_at_k") for key in keys)
