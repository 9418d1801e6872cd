"""Metrics to Weights & Biases or MLflow as well (`[track]`): the one file that knows either."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pnpo_megatron.config.run import TrackConfig
from pnpo_megatron.errors import ConfigError

Values = Mapping[str, float]


@dataclass(frozen=True)
class Tracker:
    """One open run of a tracking tool."""

    name: str
    log: Callable[[Values, int], Any]
    """Numbers, and the update they belong to."""
    close: Callable[[], Any]


def check_tools(track: TrackConfig) -> None:
    """Raise ConfigError for a tool that is asked for and not installed."""
    for name in ("wandb", "mlflow"):
        if getattr(track, name) and find_spec(name) is None:
            raise ConfigError(
                f"track.{name}: package {name} is not installed; pip install {name}, or leave it out"
            )


def open_trackers(track: TrackConfig, folder: Path, settings: Mapping[str, Any]) -> Sequence[Tracker]:
    """Every tool that is asked for. A run folder has one name there, so a resumed run goes on in it."""
    folder.mkdir(parents=True, exist_ok=True)
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    found = []
    if track.wandb:
        found.append(_wandb(track.wandb, folder, identity, settings))
    if track.mlflow:
        found.append(_mlflow(track.mlflow, folder, identity, settings))
    return found


def _wandb(project: str, folder: Path, identity: str, settings: Mapping[str, Any]) -> Tracker:
    import wandb

    run = wandb.init(
        project=project, name=folder.name, id=identity, resume="allow", dir=folder, config=dict(settings)
    )
    return Tracker("wandb", lambda values, at: run.log(dict(values), step=at), run.finish)


def _mlflow(experiment: str, folder: Path, identity: str, settings: Mapping[str, Any]) -> Tracker:
    import mlflow

    mlflow.set_experiment(experiment)
    earlier = mlflow.search_runs(filter_string=f"tags.pnpo_run = '{identity}'", output_format="list")
    if earlier:
        mlflow.start_run(run_id=earlier[0].info.run_id)
    else:
        mlflow.start_run(run_name=folder.name, tags={"pnpo_run": identity})
        mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})
    return Tracker("mlflow", lambda values, at: mlflow.log_metrics(dict(values), step=at), mlflow.end_run)
