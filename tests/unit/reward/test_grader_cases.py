"""The whole table of graded replies, from every place a grader may be called in (TRAPS H03)."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pnpo_megatron.reward.math_answer import grade, grade_sample
from pnpo_megatron.reward_types import RewardInput

TABLE = Path(__file__).resolve().parents[2] / "data" / "grader_cases.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
EXPECTED = [row["correct"] for row in ROWS]


def verdict(row: dict[str, Any]) -> bool:
    return grade(
        row["prediction_text"],
        row["gold"],
        reasoning_open=row.get("reasoning_open") or False,
        finish_reason=row.get("finish_reason"),
    ).correct


def verdicts() -> list[bool]:
    return [verdict(row) for row in ROWS]


def test_the_table_is_whole() -> None:
    assert (len(ROWS), sum(EXPECTED)) == (126, 67)


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_every_row_in_the_main_thread(row: dict[str, Any]) -> None:
    assert verdict(row) == row["correct"], row["why"]


def test_h03_every_row_in_a_worker_thread() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend(verdicts()))
    thread.start()
    thread.join(timeout=120)
    assert found == EXPECTED


def test_h03_every_row_in_a_process_pool() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(verdicts).result(timeout=120) == EXPECTED


def test_h03_every_row_in_an_event_loop() -> None:
    async def inside() -> list[bool]:
        return verdicts()

    assert asyncio.run(inside()) == EXPECTED


def test_the_reward_of_a_sample_is_its_verdict_with_open_reasoning_and_finish_reason() -> None:
    for row in ROWS[-5:]:
        sample = RewardInput(
            "question", row["gold"], row["prediction_text"], row["finish_reason"], row["reasoning_open"]
        )
        assert grade_sample(sample).correct == row["correct"], row["why"]


@pytest.mark.parametrize("gold", ["", "  ", None])
def test_a_bad_gold_is_an_error_and_never_a_verdict(gold: Any) -> None:
    with pytest.raises(ValueError, match="gold answer"):
        grade("\\boxed{4}", gold)
