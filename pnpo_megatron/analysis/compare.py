"""What a study of settings x seeds found: small JSON, and from it alone a table, intervals and a page."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from pnpo_megatron.analysis import page, plots
from pnpo_megatron.analysis.run_folder import number, read_run
from pnpo_megatron.analysis.series import TIMERS, Line
from pnpo_megatron.durable import write_text_whole
from pnpo_megatron.errors import DataError

Run = Mapping[str, Any]
RESAMPLES = 10_000
HEADER = ("setting", "n", "final", "peak", "final minus {baseline}", "responses", "rejected, last epoch")
NOTES = (
    "Scores are means over benchmarks of Avg@k, in per cent; n is the number of seeds. Every setting took "
    "the same number of updates and was evaluated after the same ones.",
    "Brackets: 95 % of a bootstrap that draws seeds and problems, with replacement, {resamples} times; "
    "differences are paired by seed and problem. With few seeds such intervals are too narrow; with one they "
    "hold problems only.",
    "A peak is the best evaluation of each run, chosen on the problems it is scored on: biased upwards, the "
    "more so the noisier the course.",
)


def run_result(folder: Path, setting: str, seed: int) -> dict[str, Any]:
    """What the table needs of one finished run; per problem the number of right samples."""
    run = read_run(folder)
    updates = {int(row["step"]): int(row["update"]) for row in run.evals}
    evaluations, problems = [], {}
    for path in sorted((folder / "eval").glob("step_*.json")):
        scored = json.loads(path.read_text(encoding="utf-8"))
        right = {}
        for name, one in scored["benchmarks"].items():
            problems[name] = sorted(one["correct"])
            right[name] = {"k": one["k"], "right": [sum(one["correct"][key]) for key in problems[name]]}
        evaluations.append({"update": updates[scored["step"]], "benchmarks": right})
    epochs = sorted({int(row["epoch"]) for row in run.updates})

    def by_epoch(key: str) -> list[float]:
        rows = [[number(row, key) for row in run.updates if row["epoch"] == epoch] for epoch in epochs]
        return [round(fmean(value for value in values if value is not None), 6) for values in rows]

    batch = (run.setting("rollout.prompts") or 0) * (run.setting("rollout.group_size") or 0)
    return {
        "setting": setting,
        "seed": seed,
        "updates": len(run.updates),
        "skipped": sum(bool(row.get("update/skipped")) for row in run.updates),
        "responses": batch * len(run.steps),
        "rejected_by_epoch": by_epoch("gate/rejected_fraction"),
        "log_ratio_mean_by_epoch": by_epoch("log_ratio/mean"),
        "log_ratio_std_by_epoch": by_epoch("log_ratio/std"),
        "reward": [round(row["reward/mean"], 6) for row in run.updates if "reward/mean" in row],
        "seconds": {
            name: round(sum(number(row, f"time/{name}_s") or 0.0 for row in run.updates), 1)
            for name in TIMERS
        },
        "evaluations": evaluations,
        "problems": problems,
    }


def joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All runs, and once for all of them the problems that they were scored on.

    Raises:
        DataError: they were not scored on the same ones.
    """
    problems = [run.pop("problems") for run in runs]
    if any(one != problems[0] for one in problems):
        raise DataError("the study's runs were evaluated on different problems; use one set of benchmarks")
    return {"problems": problems[0] if problems else {}, "runs": list(runs)}


def problem_scores(evaluation: Mapping[str, Any]) -> list[Tensor]:
    """One [problems] float64 a benchmark: each problem's share of right samples, in the order of its ids."""
    benchmarks = [one for _, one in sorted(evaluation["benchmarks"].items())]
    return [torch.tensor(one["right"], dtype=torch.float64) / one["k"] for one in benchmarks]


def macro(evaluation: Mapping[str, Any]) -> float:
    """Mean over benchmarks of the mean over problems."""
    return fmean(float(scores.mean()) for scores in problem_scores(evaluation))


def final(run: Run) -> Mapping[str, Any]:
    """The last evaluation."""
    return run["evaluations"][-1]  # type: ignore[no-any-return]


def peak(run: Run) -> Mapping[str, Any]:
    """The best evaluation, the earliest of equals."""
    return max(run["evaluations"], key=macro)  # type: ignore[no-any-return]


def interval(runs: Sequence[list[Tensor]], *, seed: int = 0) -> tuple[float, float, float]:
    """Mean and the 95 % percentile interval of a bootstrap over seeds and, the same ones for all, problems.

    Args:
        runs: for each seed, one [problems] tensor a benchmark: scores, or paired differences of scores.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn_seeds = _counts(len(runs), generator)
    tables = [torch.stack(columns) for columns in zip(*runs, strict=True)]
    means = [((drawn_seeds @ one) * _counts(one.shape[1], generator)).sum(-1) for one in tables]
    low, high = (
        torch.stack(means).mean(0).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    )
    return fmean(float(one.mean()) for one in tables), low, high


def _counts(size: int, generator: torch.Generator) -> Tensor:
    """[RESAMPLES, size] how often each of `size` things is drawn, over `size`."""
    drawn = torch.randint(size, (RESAMPLES, size), generator=generator)
    counts = torch.zeros(RESAMPLES, size, dtype=torch.float64)
    return counts.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64)) / size


def difference(runs: Sequence[Run], base: Sequence[Run]) -> tuple[int, tuple[float, float, float]] | None:
    """Number of seeds that both have, and the interval of the paired difference of final scores."""
    others = {run["seed"]: problem_scores(final(run)) for run in base}
    pairs = [(problem_scores(final(run)), others[run["seed"]]) for run in runs if run["seed"] in others]
    if not pairs:
        return None
    return len(pairs), interval([[a - b for a, b in zip(*pair, strict=True)] for pair in pairs])


def grouped(results: Mapping[str, Any]) -> dict[str, list[Run]]:
    """Finished runs by setting, in the study's order; a setting without one is there all the same."""
    order = {name: [] for name in results["settings"]}  # type: dict[str, list[Run]]
    for run in results["runs"]:
        order[run["setting"]].append(run)
    return order


def rows_of(results: Mapping[str, Any]) -> list[list[object]]:
    """The table's rows, as text."""
    groups, planned = grouped(results), len(results["seeds"])
    table: list[list[object]] = []
    for name, runs in groups.items():
        n = f"{len(runs)} of {planned}"
        if not runs:
            table.append([name, n, *[None] * 5])
            continue
        last = [run["rejected_by_epoch"][-1] for run in runs]
        table.append([
            name, n,
            *(shown(interval([problem_scores(pick(run)) for run in runs])) for pick in (final, peak)),
            _gap(runs, groups[results["baseline"]]),
            f"{runs[0]['responses']:,}", f"{100 * fmean(last):.1f} %",
        ])  # fmt: skip
    return table


def _gap(mine: Sequence[Run], other: Sequence[Run]) -> str | None:
    gap = None if mine is other else difference(mine, other)
    return None if gap is None else f"{shown(gap[1], '+')}, n = {gap[0]}"


def shown(values: tuple[float, float, float], sign: str = "") -> str:
    """A mean with its interval, in per cent."""
    mean, low, high = (100 * value for value in values)
    return f"{mean:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def headings(results: Mapping[str, Any]) -> list[str]:
    """The table's head."""
    return [cell.format(baseline=results["baseline"]) for cell in HEADER]


def differences(results: Mapping[str, Any]) -> tuple[list[str], list[list[object]]]:
    """Head and rows of the paired differences of final scores, row minus column, each with its n."""
    groups = {name: runs for name, runs in grouped(results).items() if runs}
    rows = [[name, *(_gap(mine, other) for other in groups.values())] for name, mine in groups.items()]
    return ["final, row minus column", *groups], rows  # type: ignore[return-value]


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table for a document."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join("-" if cell is None else str(cell) for cell in line) + " |\n" for line in lines
    )


def summary(results: Mapping[str, Any]) -> str:
    """Both tables, and how to read them."""
    tables = [markdown(headings(results), rows_of(results)), markdown(*differences(results))]
    return "\n".join(tables) + "\n" + "\n\n".join(notes(results)) + "\n"


def figures(results: Mapping[str, Any]) -> list[str]:
    """Mean score of every setting against updates and against responses sampled; band: sd over seeds."""

    def lines(scale: Callable[[Run], float]) -> list[Line]:
        return [_course(color, runs, scale) for color, runs in enumerate(grouped(results).values()) if runs]

    def figure(x: str, scale: Callable[[Run], float]) -> str:
        plot = plots.line_plot(x.replace(" ", "-"), lines(scale), x=x, y="score", marker="o")
        return page.figure(f"Mean score over seeds against {x}; band: standard deviation over seeds", plot)

    return [
        figure("updates", lambda run: 1.0),
        figure("responses sampled", lambda run: run["responses"] / max(run["updates"], 1)),
    ]


def _course(color: int, runs: Sequence[Run], scale: Callable[[Run], float]) -> Line:
    columns = list(zip(*(run["evaluations"] for run in runs), strict=True))
    scores = [[macro(one) for one in column] for column in columns]
    spread = [stdev(values) for values in scores] if len(runs) > 1 else None
    return Line(
        color,
        [column[0]["update"] * scale(runs[0]) for column in columns],
        [fmean(s) for s in scores],
        spread,
    )


def notes(results: Mapping[str, Any]) -> list[str]:
    """How to read the table, and which runs failed."""
    failed = [f"{name}: {why}" for name, why in results.get("failed", {}).items()]
    said = [note.format(resamples=f"{RESAMPLES:,}") for note in NOTES]
    return said + ([f"Runs that ended with a fault: {'; '.join(failed)}."] if failed else [])


def build_page(results: Mapping[str, Any]) -> str:
    """One self-contained page: table, courses, how to read them."""
    parts = [
        page.heading(results["name"], level=1),
        page.table("study", headings(results), rows_of(results)),
        page.heading("Paired differences"),
        page.table("differences", *differences(results)),
        *(page.paragraph(note) for note in notes(results)),
        page.legend(list(results["settings"])),
        page.grid(figures(results) if results["runs"] else []),
    ]
    return page.page(f"pnpo-megatron: {results['name']}", parts)


def write_results(results: Mapping[str, Any], folder: Path) -> None:
    """results.json, results.md and report.html, each whole or not at all."""
    texts = {
        "results.json": json.dumps(results, separators=(",", ":")) + "\n",
        "results.md": summary(results),
        "report.html": build_page(results),
    }
    for name, text in texts.items():
        write_text_whole(folder / name, text)
