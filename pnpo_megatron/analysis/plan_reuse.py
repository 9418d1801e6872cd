"""``pnpo-megatron plan-reuse``: how many epochs a rollout batch should serve, from timers or step times."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pnpo_megatron.analysis.reuse import (
    Recommendation,
    ReuseTax,
    StepCost,
    balanced_epochs,
    recommend,
    regime,
    split_step_cost,
)
from pnpo_megatron.analysis.reuse_tax import reuse_taxes
from pnpo_megatron.analysis.run_folder import Row, RunFolder, number, read_run
from pnpo_megatron.errors import DONE, ConfigError

ONCE_A_BATCH = ("generate", "reward", "logprobs", "sync")
"""Timers `time/NAME_s` of the first update row of a step; together they are G."""
HEADINGS = ("K", "steps", "s/step", "hours", "responses", "G share", "speed-up", "G : K*T", "tax, points")
EXAMPLE = "--step-seconds 1=283 4=510"


@dataclass(frozen=True)
class Budget:
    """What every K is compared at; the defaults are the paper's."""

    updates: int = 2400
    updates_per_epoch: int = 4
    responses: int = 2048
    """Responses in a rollout batch."""


def main(words: Sequence[str]) -> int:
    """Print the split, the regimes and the recommended K.

    Raises:
        ConfigError: nothing to read, times that no split explains, or runs that cannot be compared.
        DataError: a folder without metrics.
    """
    parser = argparse.ArgumentParser(prog="pnpo-megatron plan-reuse")
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folder whose timers are read; further runs with other numbers of epochs give the reuse tax",
    )
    parser.add_argument(
        "--step-seconds",
        nargs="+",
        metavar="K=SECONDS",
        default=[],
        help="seconds of a whole step at K epochs, instead of a run's timers: 1=283 4=510",
    )
    parser.add_argument("--updates", type=int, help="optimizer updates of every K (the run's, or 2400)")
    parser.add_argument("--updates-per-epoch", type=int, help="mini-batches a batch (the run's, or 4)")
    parser.add_argument("--responses", type=int, help="responses a batch (the run's, or 2048)")
    parser.add_argument(
        "--overlapped", action="store_true", help="generation runs beside training: max(G, K*T)"
    )
    arguments = parser.parse_args(words)
    runs = [read_run(path) for path in arguments.runs]
    if arguments.step_seconds:
        cost = split_step_cost(parse_step_seconds(arguments.step_seconds), overlapped=arguments.overlapped)
    elif runs:
        cost = measured_cost(runs[0], overlapped=arguments.overlapped)
    else:
        raise ConfigError(f"plan-reuse: nothing to read; give a run folder, or {EXAMPLE}")
    budget = plan_budget(runs[0] if runs else None, arguments)
    tax, remarks = reuse_taxes(runs)
    print_plan(cost, budget, tax, remarks, Console(highlight=False, soft_wrap=True))
    return DONE


def parse_step_seconds(items: Sequence[str]) -> dict[int, float]:
    """``["1=283", "4=510"]`` to ``{1: 283.0, 4: 510.0}``.

    Raises:
        ConfigError: not K=SECONDS, a K below 1, seconds that are not positive, or a K given twice.
    """
    seconds: dict[int, float] = {}
    for item in items:
        key, _, value = item.partition("=")
        try:
            epochs, duration = int(key), float(value)
        except ValueError as error:
            raise ConfigError(f"--step-seconds {item}: expected K=SECONDS, e.g. {EXAMPLE}") from error
        if epochs < 1 or not (math.isfinite(duration) and duration > 0):
            raise ConfigError(f"--step-seconds {item}: expected K >= 1 and seconds > 0, e.g. {EXAMPLE}")
        if epochs in seconds:
            raise ConfigError(f"--step-seconds {item}: K = {epochs} came twice; give the mean of its steps")
        seconds[epochs] = duration
    return seconds


def measured_cost(run: RunFolder, *, overlapped: bool = False) -> StepCost:
    """G and T from a run's own timers, as means over its steps; the first, a warm-up, counts only if alone.

    T is the mean seconds of an update times the updates of a whole epoch, so epochs that were stopped
    early do not make it look cheap.

    Raises:
        ConfigError: no update yet, or a timer is missing.
    """
    steps = run.steps
    if not steps:
        raise ConfigError(f"{run.path}: no update in metrics.jsonl yet; wait for one, or give {EXAMPLE}")
    used = [rows for step, rows in steps.items() if step != min(steps)] or list(steps.values())
    parts = {name: fmean(_timer(run, rows[0], f"time/{name}_s") for rows in used) for name in ONCE_A_BATCH}
    update_s = fmean(_timer(run, row, "time/update_s") for rows in used for row in rows)
    return StepCost(
        generation_s=math.fsum(parts.values()),
        update_s=update_s * updates_per_epoch(run),
        overlapped=overlapped,
        parts=parts,
    )


def updates_per_epoch(run: RunFolder) -> int:
    """M: from the settings, or counted in the first epochs."""
    prompts, mini_batch = run.setting("rollout.prompts"), run.setting("objective.mini_batch")
    if prompts and mini_batch:
        return int(prompts) // int(mini_batch)
    return max(len([row for row in rows if row["epoch"] == 1]) for rows in run.steps.values())


def plan_budget(run: RunFolder | None, arguments: argparse.Namespace) -> Budget:
    """The run's budget where there is a run, the paper's otherwise; flags override both."""
    budget = Budget()
    if run is not None and run.updates:
        each, steps, epochs = updates_per_epoch(run), run.setting("steps"), run.setting("objective.epochs")
        planned = int(steps) * int(epochs) * each if steps and epochs else len(run.updates)
        sampled = (run.setting("rollout.prompts") or 0) * (run.setting("rollout.group_size") or 0)
        budget = Budget(planned, each, int(sampled) or budget.responses)
    given = {key: value for key in vars(budget) if (value := getattr(arguments, key)) is not None}
    for key, value in given.items():
        if value < 1:
            flag = f"--{key.replace('_', '-')}"
            raise ConfigError(f"{flag} {value}: expected at least 1, e.g. {flag} {getattr(budget, key)}")
    return replace(budget, **given)


def print_plan(
    cost: StepCost, budget: Budget, tax: Mapping[int, ReuseTax], remarks: Sequence[str], console: Console
) -> None:
    """The split in sentences, the regimes as a table, the recommendation last."""
    choice = recommend(cost, tax)
    generation, optimizer = f"{cost.generation_s:.1f} s/batch", f"{cost.update_s:.1f} s/epoch"
    console.print(f"generation {generation} (G), optimizer {optimizer} (T)")
    if cost.parts:
        console.print("  G: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in cost.parts.items()))
    if len(cost.residuals) > 2:
        fitted = ", ".join(f"K={k} {residual:+.1f} s" for k, residual in cost.residuals.items())
        console.print(f"  least squares over {len(cost.residuals)} points; measured minus fitted: {fitted}")
    rule = "max(G, K*T), generation beside training" if cost.overlapped else "G + K*T"
    console.print(f"step = {rule}; speed-up at most {cost.ceiling:.2f}x however large K is")
    console.print(_regime_table(cost, budget, tax, choice))
    for remark in remarks:
        console.print(remark)
    console.print(f"recommended K = {choice.epochs}: {choice.reason}")


def _regime_table(
    cost: StepCost, budget: Budget, tax: Mapping[int, ReuseTax], choice: Recommendation
) -> Table:
    table = Table(
        box=SIMPLE_HEAD, title=f"the same {budget.updates:,} updates, {budget.updates_per_epoch} an epoch"
    )
    for heading in HEADINGS if tax else HEADINGS[:-1]:
        table.add_column(heading, justify="right", no_wrap=True)
    largest = max(16, 4 * balanced_epochs(cost))
    for epochs in (2**power for power in range(largest.bit_length())):
        row, lost = regime(cost, epochs, **vars(budget)), tax.get(epochs)
        cells = (
            str(epochs),
            f"{row.steps:,.1f}".removesuffix(".0"),
            f"{row.step_s:.0f}",
            f"{row.hours:.2f}",
            f"{row.responses:,.0f}",
            f"{100 * row.generation_share:.1f} %",
            f"{row.speedup:.2f}x",
            f"{row.fleet_ratio:.2f}:1",
            f"{lost.points:+.2f} +- {lost.stderr:.2f}" if lost else "-",
        )
        table.add_row(*cells[: len(table.columns)], style="bold" if epochs == choice.epochs else None)
    return table


def _timer(run: RunFolder, row: Row, key: str) -> float:
    value = number(row, key)
    if value is None:
        raise ConfigError(
            f"{run.path / 'metrics.jsonl'}: update {row.get('update')} has no {key}, which plan-reuse "
            f"needs; use a run made by this version, or give {EXAMPLE}"
        )
    return value
