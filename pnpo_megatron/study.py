"""``pnpo-megatron compare STUDY.toml``: a grid of settings x seeds at one budget of updates, run in a queue.

A study names a configuration, settings over it, seeds, and a budget that every run shares:

    config = "config.toml"
    folder = "runs/study"
    updates = 48                  # of every run; its rollout batches follow from epochs and mini_batch
    evaluate_every = 16           # updates
    seeds = [1, 2, 3]
    [common]                      # over the configuration, for all
    rollout.prompts = 32
    [settings.pnpo]               # one table a setting; the first is the baseline unless `baseline` names
                                  # one; a named objective takes no weight, gate or mean from `config`
    objective.name = "pnpo"
    [grid]                        # every setting with every value
    objective.epochs = [1, 4]

Engine and graders live on from run to run. A run is a run folder: killed, it goes on where its last
checkpoint stands, and a finished one is never run again. Any number of processes may work on one study: each
locks the run it works on, and a lock goes with its process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pnpo_megatron.algorithm.presets import OBJECTIVE_KEYS
from pnpo_megatron.analysis.compare import headings, joined, markdown, rows_of, run_result, write_results
from pnpo_megatron.analysis.report import flatten
from pnpo_megatron.config import Config, load_config
from pnpo_megatron.durable import locked
from pnpo_megatron.errors import DONE, STOPPED_EARLY, ConfigError, RolloutError, TrainingFaultError
from pnpo_megatron.resume import is_complete

KEYS = {"config", "folder", "updates", "evaluate_every", "seeds", "settings"}
OPTIONAL = {"common", "grid", "baseline", "processes"}
ENGINE = ("model", "rollout", "reward")
"""Sections on which two runs must agree to share an engine and graders."""


@dataclass(frozen=True)
class Cell:
    """One run of the study."""

    setting: str
    seed: int
    config: Config

    @property
    def finished(self) -> bool:
        """The checkpoint of the last step is written after its evaluation."""
        return is_complete(self.config.run.folder, self.config.steps)


@dataclass(frozen=True)
class Study:
    """All runs, in the order of the queue: every setting once before any seed's second."""

    path: Path
    folder: Path
    baseline: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    processes: int
    cells: tuple[Cell, ...]


def read_study(path: Path) -> Study:
    """Read the file and check every run's settings.

    Raises:
        ConfigError: a key that is missing, unknown or wrong; a budget that a setting cannot meet exactly.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML ({error}); give the file of a study") from error
    wrong = (KEYS - table.keys()) | (table.keys() - KEYS - OPTIONAL)
    if wrong:
        raise ConfigError(
            f"{path}: {', '.join(sorted(wrong))}: missing or unknown; a study has {sorted(KEYS)} and "
            f"may have {sorted(OPTIONAL)}"
        )
    settings = dict(_settings(table))
    folder, baseline = Path(table["folder"]), table.get("baseline", next(iter(settings), None))
    if baseline not in settings:
        raise ConfigError(
            f"{path}: baseline = {baseline!r}: expected one of {', '.join(settings) or 'settings'}"
        )
    cells = tuple(
        Cell(name, seed, _cell_config(table, folder, name, values, seed))
        for seed in table["seeds"]
        for name, values in settings.items()
    )
    return Study(
        path, folder, str(baseline), tuple(settings), tuple(table["seeds"]), table.get("processes", 1), cells
    )


def _settings(table: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every setting with every combination of the grid: name and flat ``section.key`` values."""
    axes = flatten(table.get("grid", {}))
    common = dict(flatten(table.get("common", {})))
    for name, values in table["settings"].items():
        for chosen in itertools.product(*(list(axis) for _, axis in axes)):  # type: ignore[call-overload]
            point = dict(zip((key for key, _ in axes), chosen, strict=True))
            words = [name, *(f"{key.rpartition('.')[2]}={value}" for key, value in point.items())]
            yield " ".join(words), common | point | dict(flatten(values))


def _cell_config(table: dict[str, Any], folder: Path, name: str, values: dict[str, Any], seed: int) -> Config:
    """The settings of one run; steps and the cadence of evaluation follow from the budget in updates."""
    run_folder = folder / re.sub(r"[^\w.=-]+", "_", name) / f"seed_{seed}"
    values = values | {"seed": seed, "run.folder": str(run_folder)}
    without = [f"objective.{key}" for key in OBJECTIVE_KEYS] if "objective.name" in values else []
    first = load_config(table["config"], _flags(values), without=without)
    per_step = first.objective.epochs * (first.rollout.prompts // first.objective.mini_batch)
    for key in ("updates", "evaluate_every"):
        if table[key] < 1 or table[key] % per_step:
            raise ConfigError(
                f"{key} = {table[key]}: {name} takes {per_step} updates a rollout batch; use a multiple"
            )
    budget = {"steps": table["updates"] // per_step, "eval.every": table["evaluate_every"] // per_step}
    return load_config(table["config"], _flags(values | budget), without=without)


def _flags(values: dict[str, Any]) -> list[str]:
    return [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()
    ]


def compare_study(path: Path, *, worker: bool = False) -> bool:
    """Run what is left of the study, then write its table and page; False when a signal ended it early.

    Raises:
        ConfigError: a setting that cannot be used, a folder of other settings, or several ranks.
    """
    from pnpo_megatron.checkpoints import Start

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "compare works in single processes: start it without torchrun, with `processes = N`"
        )
    study = read_study(path)
    for cell in study.cells:
        Start().check(cell.config)  # a folder begun with other settings must not end up in the table
    study.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pnpo_megatron", "compare", str(path), "--worker"]
    others = [subprocess.Popen(command) for _ in range(0 if worker else study.processes - 1)]
    try:
        complete = _work_through(study)
        codes = [other.wait() for other in others]
    finally:
        for other in others:
            other.terminate()
    if not worker:
        results = study_results(study)
        write_results(results, study.folder)
        print(markdown(headings(results), rows_of(results)))
        print(f"{study.folder / 'report.html'}")
    return complete and not any(codes)


def study_results(study: Study) -> dict[str, Any]:
    """The finished runs' results; the same whatever was killed and resumed on the way."""
    faults = {f"{cell.setting}, seed {cell.seed}": fault.read_text(encoding="utf-8").strip()
              for cell in study.cells if (fault := cell.config.run.folder / "fault").is_file()}  # fmt: skip
    finished = [
        run_result(one.config.run.folder, one.setting, one.seed) for one in study.cells if one.finished
    ]
    return {
        "name": study.path.stem,
        "baseline": study.baseline,
        "settings": list(study.settings),
        "seeds": list(study.seeds),
        "failed": faults,
        **joined(finished),
    }


def _work_through(study: Study) -> bool:
    """Every cell that is neither finished nor another process's; False after a signal."""
    with Engines() as engines:
        for cell in study.cells:
            lock = cell.config.run.folder / "lock"
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
            with locked(lock) as mine:
                if mine and not cell.finished and not engines.run(cell):
                    return False
    return True


class Engines:
    """Engine and graders that outlive a run, started anew when a run needs others or one has died."""

    def __init__(self) -> None:
        self._stack, self._key, self._parts = ExitStack(), "", None  # type: ExitStack, str, Any

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, cell: Cell) -> bool:
        """Train one run; a fault of it is written down, and the others go on. False after a signal."""
        from pnpo_megatron import build
        from pnpo_megatron.policy.process_groups import release_parallel
        from pnpo_megatron.run import Run

        config, fault = cell.config, cell.config.run.folder / "fault"
        inputs = build.read_inputs(config)
        key = json.dumps(
            [config.model_dump(mode="json")[section] for section in ENGINE]
            + [config.eval.max_response_tokens]
        )
        if key != self._key:
            self._stack.close()
            self._parts, self._key = self._stack.enter_context(build.rollout_parts(config, inputs)), key
        try:
            with build.live_parts(config, inputs, self._parts) as live:
                run = Run(config, live)
                try:
                    complete = run.train()
                finally:
                    run.close()
            fault.unlink(missing_ok=True)
            return complete
        except (RolloutError, TrainingFaultError) as error:
            fault.write_text(f"{error}\n", encoding="utf-8")
            print(f"{cell.setting}, seed {cell.seed}: {error}", file=sys.stderr)
            self._key = ""
            return True
        finally:
            release_parallel()
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)  # the run's own handler would now wait for nothing


def main(words: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="pnpo-megatron compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("study", type=Path, metavar="STUDY.toml")
    parser.add_argument("--worker", action="store_true", help="only help with the queue; write no table")
    arguments = parser.parse_args(words)
    return DONE if compare_study(arguments.study, worker=arguments.worker) else STOPPED_EARLY
