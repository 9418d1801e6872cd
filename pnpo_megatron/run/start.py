"""Starts a training run, or goes on with one, and sees that everything it started ends."""

import gc
import os
from pathlib import Path

from pnpo_megatron.build import live_parts
from pnpo_megatron.checkpoints import Start
from pnpo_megatron.config import Config
from pnpo_megatron.inputs import read_inputs
from pnpo_megatron.parallel.watch import Watch
from pnpo_megatron.resume import is_complete
from pnpo_megatron.run.training import Run


def run_training(
    config: Config,
    *,
    dump_tokens: int | None = None,
    chosen: str = "",
    allow_change: bool = False,
    profile: int | None = None,
) -> bool:
    """Train until `config.steps` or a stop signal. Collective: every rank calls it.

    Args:
        dump_tokens: step of which every token of every update is written to RUN/tokens.
        profile: step of which a trace and a table go to RUN/profile.
        chosen: name of the checkpoint to go on from; empty takes the newest that is sound.
        allow_change: go on with settings that change the run.
    Returns:
        True when the run is complete, False when it stopped early with a checkpoint.

    Raises:
        UserError: before anything is built, if the input is wrong.
    """
    if not chosen and is_complete(config.run.folder, config.steps):
        print(f"{config.run.folder}: complete, {config.steps} steps; raise steps to go on")
        return True
    start = Start(chosen, allow_change)
    start.check(config)
    inputs = read_inputs(config)
    with (
        live_parts(config, inputs) as live,
        Watch(
            config.run.silence_s, live.groups.control, lambda: write_exit_code(config.run.folder, 1)
        ) as watch,
    ):
        gc.freeze()  # what is imported and built stays: Megatron collects garbage at every save
        gc.enable()
        run = Run(config, live, watch, start, dump_tokens, profile)
        try:
            return run.train()
        finally:
            run.close()


def write_exit_code(run_folder: Path, code: int) -> None:
    """For the batch script: torchrun turns every exit code into 1. Rank 0 writes."""
    if int(os.environ.get("RANK", "0")) == 0 and run_folder.is_dir():
        (run_folder / "exit_code").write_text(f"{code}\n")
