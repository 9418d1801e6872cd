"""``pnpo-megatron calibrate-gate RUN``: gate tolerances from the token dumps of a run."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pnpo_megatron.algorithm import objective_settings, resolve_weight
from pnpo_megatron.algorithm.presets import OBJECTIVE_KEYS
from pnpo_megatron.analysis.calibrate import Tokens, Tolerances, calibrate, excess, slices
from pnpo_megatron.analysis.run_folder import RunFolder, read_run
from pnpo_megatron.analysis.token_dump import TokenDump, read_tokens
from pnpo_megatron.errors import DONE, ConfigError, DataError


def main(words: Sequence[str]) -> int:
    """Print what was measured in every epoch and recommend the last epoch's tolerances.

    Raises:
        ConfigError: an acceptance outside (0, 1), or a step that was not dumped.
        DataError: no token dump.
    """
    parser = argparse.ArgumentParser(prog="pnpo-megatron calibrate-gate")
    parser.add_argument(
        "run", metavar="RUN", help="run folder with tokens/, written by train --dump-tokens STEP"
    )
    parser.add_argument("--acceptance", type=float, default=0.95, help="share of tokens to keep (0.95)")
    parser.add_argument("--step", type=int, help="which dumped step (default: the newest)")
    arguments = parser.parse_args(words)
    wanted = arguments.acceptance
    if not 0.0 < wanted < 1.0:
        raise ConfigError(f"--acceptance {wanted}: expected a share between 0 and 1, e.g. --acceptance 0.95")
    run = read_run(arguments.run)
    gate = run_gate(run)
    epochs = epoch_tokens(step_dumps(run, arguments.step), gate)
    console = Console(highlight=False, soft_wrap=True)
    console.print(gate_sentence(gate))
    print_epochs(epochs, gate, wanted, console)
    print_recommendation(epochs[-1], wanted, console)
    return DONE


def run_gate(run: RunFolder) -> dict[str, Any]:
    """The run's objective if it has a band gate; PNPO's weight and schedule otherwise."""
    section = run.setting("objective") or {}
    given = {key: section.get(key) for key in OBJECTIVE_KEYS}
    settings = objective_settings(section.get("name", "pnpo"), **given)
    return settings if settings["gate"] in ("sqrt", "flat") else {"weight": "prefix", "gate": "sqrt"}


def step_dumps(run: RunFolder, step: int | None) -> list[TokenDump]:
    """The dumps of one step, by default the newest."""
    dumps = read_tokens(run.path)
    steps = sorted({dump.step for dump in dumps})
    if not steps:
        raise DataError(
            f"{run.path / 'tokens'}: no token dump; run `pnpo-megatron train CONFIG --dump-tokens STEP`"
        )
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ConfigError(f"--step {step}: not dumped; there are {', '.join(str(one) for one in steps)}")
    return [dump for dump in dumps if dump.step == chosen]


def epoch_tokens(dumps: Sequence[TokenDump], gate: dict[str, Any]) -> list[Tokens]:
    """The tokens of every epoch, its updates joined."""
    epochs: dict[int, list[TokenDump]] = {}
    for dump in dumps:
        epochs.setdefault(dump.epoch, []).append(dump)
    return [_join(epoch, parts, gate) for epoch, parts in sorted(epochs.items())]


def gate_sentence(gate: dict[str, Any]) -> str:
    """What is calibrated."""
    scale = "1 (flat)" if gate["gate"] == "flat" else f"sqrt({gate.get('gate_reference_length') or 'L'} / t)"
    return f"weight: {gate['weight']}; gate keeps 1 - gate_low*h <= w <= 1 + gate_high*h with h = {scale}"


def print_epochs(epochs: Sequence[Tokens], gate: dict[str, Any], wanted: float, console: Console) -> None:
    """Log-ratios, tolerances and what the run's own keep now, one line an epoch."""
    table = Table(box=SIMPLE_HEAD, title="log-ratios, and the tolerances they call for")
    for heading in ("epoch", "tokens", "mean", "spread", "gate_low", "gate_high", "kept now"):
        table.add_column(heading, justify="right", no_wrap=True)
    present = Tolerances(gate["gate_low"], gate["gate_high"]) if "gate_low" in gate else None
    for tokens in epochs:
        found = calibrate(tokens, wanted)
        kept = f"{100 * tokens.acceptance(present.gate_low, present.gate_high):.1f} %" if present else "-"
        table.add_row(
            str(tokens.epoch),
            f"{len(tokens.excess):,}",
            f"{tokens.log_ratio.mean():+.3e}",
            f"{tokens.log_ratio.std(correction=0):.3e}",
            f"{found.gate_low:.3e}", f"{found.gate_high:.3e}", kept,
        )  # fmt: skip
    console.print(table)


def print_recommendation(tokens: Tokens, wanted: float, console: Console) -> None:
    """The last epoch's tolerances, where they keep how much, and the lines to paste."""
    found = calibrate(tokens, wanted)
    band = f"gate_low = {found.gate_low:.3e}, gate_high = {found.gate_high:.3e}"
    console.print(f"epoch {tokens.epoch}, the last, with {band}")
    for heading, rows in slices(tokens, found).items():
        table = Table(box=SIMPLE_HEAD)
        for column in (heading, "part of tokens, 1/L each", "kept"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, part, kept in rows:
            table.add_row(name, f"{100 * part:.1f} %", f"{100 * kept:.1f} %")
        console.print(table)
    for side, value in (("low", found.gate_low), ("high", found.gate_high)):
        if value <= 0:
            console.print(f"no positive tolerance reaches {wanted:g}: gate_{side} would be {value:.3e}")
    if found.usable:
        lines = ("[objective]", f"gate_low = {found.gate_low:.4g}", f"gate_high = {found.gate_high:.4g}")
        console.print("\n".join(lines), markup=False)


def _join(epoch: int, dumps: Sequence[TokenDump], gate: dict[str, Any]) -> Tokens:
    def joined(name: str) -> torch.Tensor:
        return torch.cat([dump.arrays[name] for dump in dumps])

    position, length = joined("position"), joined("length")
    weight = resolve_weight(gate["weight"])
    log_weight = torch.cat([dump.recomputed(weight) for dump in dumps])
    scale = gate.get("gate_reference_length") or length
    return Tokens(
        epoch=epoch,
        log_ratio=torch.cat([dump.log_ratio for dump in dumps]),
        excess=excess(log_weight, position, scale, flat=gate["gate"] == "flat"),
        position=position,
        length=length,
        advantages=joined("advantages"),
    )
