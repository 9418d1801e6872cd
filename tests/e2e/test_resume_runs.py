"""Runs that end in every way a run can end, and go on: the numbers are those of a run that nobody stopped.

Rollouts are replayed (no engine), so that a run lasts a second; `test_kills.py` has the engine's.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from quick_runs import REPLAYED, Kill, run, same_run, write_rollouts
from tiny_task import make_task, read_metrics, write_config

UPDATE = "pnpo_megatron.policy.learner:MegatronLearner.update"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("task"))
    write_rollouts(folder / "stored")
    return folder


@pytest.fixture(scope="module")
def flags(task: Path) -> tuple[str, ...]:
    return (*REPLAYED, f"--rollout.replay={task / 'stored'}")


@pytest.fixture(scope="module")
def whole(task: Path, flags: tuple[str, ...], process_server) -> Path:
    codes, output = run(process_server, write_config(task, task / "whole"), *flags)
    assert codes == [0], output
    return task / "whole"


@pytest.mark.parametrize("nth", [3, 4, 6])
def test_a_run_stopped_inside_a_batch_goes_on_from_that_update(task, flags, whole, process_server, nth):
    config = write_config(task, task / f"stopped{nth}")
    codes, output = run(process_server, config, *flags, kill=Kill(UPDATE, nth, how=signal.SIGTERM))
    assert codes == [75] and f"stopped by a signal after update {nth} of step" in output, output
    assert len(read_metrics(task / f"stopped{nth}")) == nth
    codes, output = run(process_server, config, *flags)
    assert codes == [0] and f"resuming after update {nth}, inside step" in output, output
    same_run(task / f"stopped{nth}", whole)
