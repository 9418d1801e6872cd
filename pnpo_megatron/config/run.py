"""Settings of a run's folder and of what it leaves there."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Section(BaseModel, frozen=True, extra="forbid"):
    """One table of the TOML file."""


class RunConfig(Section):
    """Where a run lives."""

    folder: Path = Path("runs/pnpo")
    deterministic: bool = False
    """GPUs only: bitwise resume, slower kernels. CPU runs always repeat bit for bit."""
    gradient_cosine: bool = False
    """Log the cosine of later epochs' gradients with the first epoch's; holds one more gradient in memory."""
    timeout_s: PositiveFloat = 1800.0
    """Longest wait of a rank for its peers (collectives of the learner)."""
    silence_s: NonNegativeFloat = 20.0
    """A rank that gives no sign of life for so long counts as dead, and the others end; 0 does not watch."""


class CheckpointConfig(Section):
    """Resumable checkpoints."""

    every: NonNegativeInt = 10
    """Rollout batches between two checkpoints; the last one and a stop by a signal save in any case."""
    within_batch: NonNegativeInt = 0
    """Updates between two checkpoints inside a rollout batch; 0 (or false) saves only between batches."""
    keep: PositiveInt = 3
    """Newest checkpoints kept, beside the best by evaluation and the newest that every layout loads."""
    portable_every: NonNegativeInt = 50
    """Rollout batches between checkpoints that load under any layout (the last one always does)."""
    asynchronous: bool = True
    """Write while training goes on."""
    on_failure: Literal["stop", "go_on"] = "stop"
    """When a checkpoint cannot be written, e.g. because the disk is full."""


class TrackConfig(Section):
    """Where metrics go besides the run folder, if the tool is installed."""

    wandb: str = ""
    """Project of Weights & Biases."""
    mlflow: str = ""
    """Experiment of MLflow; the server is what MLFLOW_TRACKING_URI says."""


class ExportConfig(Section):
    """Hugging Face folders written during training; the last step is always exported."""

    every: NonNegativeInt = 0
