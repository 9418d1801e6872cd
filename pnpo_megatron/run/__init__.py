"""One training run: what the loop's parts do on this rank, and what is due after a step."""

from pnpo_megatron.run.start import run_training, write_exit_code
from pnpo_megatron.run.training import Run

__all__ = ["Run", "run_training", "write_exit_code"]
