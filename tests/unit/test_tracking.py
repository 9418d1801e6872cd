"""Weights & Biases and MLflow: the real packages where they are installed, without a server."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pnpo_megatron.config.run import TrackConfig
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.monitor import Monitor
from pnpo_megatron.tracking import Tracker, check_tools, open_trackers


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in that notes its calls."""
    calls: list[Any] = []

    def init(**settings: Any) -> Any:
        calls.append(settings)
        return SimpleNamespace(
            log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, calls=calls))
    return calls


def test_numbers_of_every_row_reach_the_tool_under_the_run_s_own_name(tmp_path: Path, wandb: Any) -> None:
    for update in (1, 2):  # the second is a resumed run
        trackers = open_trackers(TrackConfig(wandb="maths"), tmp_path, {"seed": 42})
        monitor = Monitor(tmp_path, total_updates=2, trackers=trackers)
        monitor.log_update(
            step=1,
            epoch=1,
            update=update,
            metrics={"loss": 0.5, "update/skip_reason": "every advantage is 0"},
        )
        monitor.close()
    first, row, end, second, *_ = wandb
    assert (first["project"], first["config"], first["resume"]) == ("maths", {"seed": 42}, "allow")
    assert first["id"] == second["id"] and row == (1, {"loss": 0.5}) and end == "finish"


def test_a_tool_that_fails_is_named_and_left_while_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(values: Any, at: int) -> None:
        raise ConnectionError("no route")

    monitor = Monitor(tmp_path, total_updates=2, trackers=[Tracker("mlflow", fails, lambda: None)])
    for update in (1, 2):
        monitor.log_update(step=1, epoch=1, update=update, metrics={"loss": 0.5})
    monitor.close()
    assert capsys.readouterr().err.count("mlflow gets no more metrics: ConnectionError: no route") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_a_tool_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pnpo_megatron.tracking.find_spec", lambda name: None)
    check_tools(TrackConfig())
    with pytest.raises(
        ConfigError, match=r"track\.mlflow: package mlflow is not installed; pip install mlflow"
    ):
        check_tools(TrackConfig(mlflow="runs"))


def test_mlflow_goes_on_in_the_run_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for update in (1, 2):
        (tracker,) = open_trackers(TrackConfig(mlflow="maths"), tmp_path / "run", {"seed": 42})
        tracker.log({"loss": update / 2}, update)
        tracker.close()
    (run,) = mlflow.search_runs(experiment_names=["maths"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 1.0)]
    assert run.data.params == {"seed": "42"}


def test_wandb_takes_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tracker,) = open_trackers(TrackConfig(wandb="maths"), tmp_path, {"seed": 42})
    tracker.log({"loss": 0.5}, 1)
    tracker.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
