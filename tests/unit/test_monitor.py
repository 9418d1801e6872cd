"""metrics.jsonl is one flat JSON object a row, and a resumed run continues the same file."""

from __future__ import annotations

import json

import pytest

from pnpo_megatron.monitor import Monitor


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_are_flat_json_with_their_position(tmp_path):
    monitor = Monitor(tmp_path, total_updates=4)
    monitor.log_eval(step=0, update=0, metrics={"eval/sums/avg_at_k": 0.5})
    monitor.log_update(step=1, epoch=2, update=3, metrics={"loss": float("nan"), "grad_norm": 1.5})
    monitor.close()
    assert rows(tmp_path) == [
        {"kind": "eval", "step": 0, "update": 0, "eval/sums/avg_at_k": 0.5},
        {"kind": "update", "step": 1, "epoch": 2, "update": 3, "loss": None, "grad_norm": 1.5},
    ]


def test_resuming_cuts_rows_that_the_checkpoint_had_not_seen(tmp_path):
    first = Monitor(tmp_path, total_updates=4)
    first.log_update(step=1, epoch=1, update=1, metrics={"loss": 1.0})
    saved = first.flush()
    first.log_update(step=2, epoch=1, update=2, metrics={"loss": 99.0})
    first.close()
    second = Monitor(tmp_path, total_updates=4, resume_at_bytes=saved)
    second.log_update(step=2, epoch=1, update=2, metrics={"loss": 2.0})
    second.close()
    assert [row["loss"] for row in rows(tmp_path)] == [1.0, 2.0]


def test_a_rank_that_is_not_active_writes_nothing(tmp_path):
    monitor = Monitor(tmp_path / "run", total_updates=1, active=False)
    monitor.log_update(step=1, epoch=1, update=1, metrics={"loss": 1.0})
    monitor.close()
    assert not (tmp_path / "run").exists()


def test_every_number_reaches_tensorboard(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = Monitor(tmp_path, total_updates=2)
    monitor.log_update(step=1, epoch=1, update=1, metrics={"gate/rejected_fraction": 0.25})
    monitor.log_update(step=1, epoch=2, update=2, metrics={"gate/rejected_fraction": 0.5})
    monitor.close()
    events = loader.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("gate/rejected_fraction")] == [(1, 0.25), (2, 0.5)]


def test_a_file_that_lost_rows_is_named_and_goes_on_after_its_last_whole_row(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1.0}\n{"loss": 2.')
    monitor = Monitor(tmp_path, total_updates=4, resume_at_bytes=500, update=2)
    monitor.log_update(step=2, epoch=1, update=3, metrics={"loss": 3.0})
    monitor.close()
    assert "25 bytes, the checkpoint saw 500" in capsys.readouterr().err
    assert [row["loss"] for row in rows(tmp_path)] == [1.0, 3.0]


def test_tensorboard_forgets_the_updates_that_are_made_again(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed, loss in ((0, 9.0), (1, 2.0)):
        monitor = Monitor(tmp_path, total_updates=2, resume_at_bytes=0 if resumed else None, update=resumed)
        for update in range(resumed + 1, 3):
            monitor.log_update(step=1, epoch=1, update=update, metrics={"loss": loss})
        monitor.close()
    events = loader.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 9.0), (2, 2.0)]
