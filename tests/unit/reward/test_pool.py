"""The grading processes: deadlines, deaths and faults never become rewards, and nothing hangs."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pnpo_megatron.errors import ConfigError
from pnpo_megatron.reward.pool import RewardPool
from pnpo_megatron.reward_types import RewardInput, RewardResult

DEADLINE_S = 1.0
PAIRS = [("\\boxed{033}", "33", 1.0), ("\\boxed{330}", "33", 0.0), ("Answer: 0.5", "\\frac{1}{2}", 1.0),
         ("<think>\\boxed{4}", "4", 0.0)]  # fmt: skip


def sample(text: str, answer: str = "4") -> RewardInput:
    return RewardInput("question", answer, text)


@pytest.fixture(scope="module")
def scripted() -> Iterator[RewardPool]:
    with RewardPool("reward_functions:scripted", workers=2, timeout_s=DEADLINE_S) as pool:
        yield pool


@pytest.fixture(scope="module")
def maths() -> Iterator[RewardPool]:
    with RewardPool("math", workers=1, timeout_s=30.0) as pool:
        yield pool


def test_results_come_back_in_order_while_a_bad_one_is_still_running(scripted: RewardPool) -> None:
    futures = scripted.submit([sample("hang"), sample("abc"), sample("abcde")])
    assert [future.result(timeout=30).value for future in futures[1:]] == [0.3, 0.5]
    assert not futures[0].done()
    assert futures[0].result(timeout=30) == RewardResult(0.0, timed_out=True)


@pytest.mark.parametrize(
    ("text", "named"),
    [("nan", "nan"), ("inf", "inf"), ("none", "None"), ("word", "'1.0'"), ("raise", "KeyError"),
     ("die", "exit code 3"), ("exit", "exit code 0"), ("hog", "MemoryError")],
)  # fmt: skip
def test_h03_a_function_that_fails_is_a_fault_and_not_a_reward(
    scripted: RewardPool, text: str, named: str
) -> None:
    result, after = scripted.grade([sample(text), sample("abc")])
    assert result.value is None and named in result.fault and not result.timed_out
    assert after.value == 0.3  # the pool goes on


def test_a_response_too_slow_twice_is_wrong_and_costs_two_deadlines(scripted: RewardPool) -> None:
    start = time.monotonic()
    (result,) = scripted.grade([sample("hang")])
    assert result == RewardResult(0.0, timed_out=True)
    assert 2 * DEADLINE_S <= time.monotonic() - start < 2 * DEADLINE_S + 15


def test_a_response_slow_only_once_gets_its_reward_on_the_retry(scripted: RewardPool, tmp_path: Path) -> None:
    (result,) = scripted.grade([sample(f"slow first:{tmp_path / 'marker'}")])
    assert result == RewardResult(1.0)


def test_a_worker_killed_from_outside_is_replaced(scripted: RewardPool) -> None:
    for worker in scripted._workers:
        os.kill(worker._process.pid, signal.SIGKILL)
    assert [result.value for result in scripted.grade([sample("abc")] * 4)].count(0.3) >= 2
    assert scripted.grade([sample("abcd")])[0].value == 0.4


def test_workers_finish_their_grade_when_the_whole_job_is_told_to_stop(scripted: RewardPool) -> None:
    assert scripted.grade([sample("stop signal")])[0].value == 1.0


def test_workers_stay_light(scripted: RewardPool) -> None:
    assert scripted.grade([sample("has torch")])[0].value == 0.0


def test_several_functions_add_with_their_weights() -> None:
    with RewardPool({"reward_functions:half": 2.0, "reward_functions:scripted": 1.0}, workers=1) as pool:
        weighted, fault = pool.grade([sample("abc"), sample("none")])
    assert math.isclose(weighted.value or 0.0, 2.0 * 0.5 + 0.3)
    assert fault.value is None


@pytest.mark.parametrize(
    ("function", "named"),
    [("reward_functions:missing", "missing"), ("no_such_module:f", "no_such_module"),
     ("half", "module:function"), ("reward_functions:NOT_A_FUNCTION", "int")],
)  # fmt: skip
def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(function: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RewardPool(function, workers=1)


@pytest.mark.parametrize("settings", [{"workers": 0}, {"timeout_s": 0.0}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="reward.workers"):
        RewardPool("math", **settings)  # type: ignore[arg-type]


def test_closing_ends_workers_and_waiting_futures_at_once() -> None:
    pool = RewardPool("reward_functions:scripted", workers=1, timeout_s=60.0)
    futures = pool.submit([sample("hang"), sample("abc")])
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 10
    assert all(future.done() for future in futures)
    assert [worker._process.poll() is not None for worker in pool._workers] == [True]
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit([sample("abc")])


def test_workers_do_not_outlive_a_killed_parent() -> None:
    code = (
        "from pnpo_megatron.reward.pool import RewardPool\n"
        "pool = RewardPool('reward_functions:half', workers=1)\n"
        "print(pool._workers[0]._process.pid, flush=True)\n"
        "input()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while _is_running(worker):
        assert time.monotonic() < deadline, f"worker {worker} is still there"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_h03_maths_rewards_are_the_same_from_main_thread_thread_and_event_loop(maths: RewardPool) -> None:
    inputs, expected = [sample(text, gold) for text, gold, _ in PAIRS], [value for _, _, value in PAIRS]
    assert [result.value for result in maths.grade(inputs)] == expected
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.extend(result.value for result in maths.grade(inputs)))
    thread.start()
    thread.join(timeout=60)
    assert found == expected

    async def from_loop() -> list[RewardResult]:
        return await asyncio.gather(*map(asyncio.wrap_future, maths.submit(inputs)))

    assert [result.value for result in asyncio.run(from_loop())] == expected


def test_h03_the_pool_works_inside_a_daemonic_pool_process() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(_grade_in_pool_process).get(timeout=120) == [value for _, _, value in PAIRS]


def _grade_in_pool_process() -> list[float | None]:
    with RewardPool("math", workers=1, timeout_s=30.0) as pool:
        return [result.value for result in pool.grade([sample(text, gold) for text, gold, _ in PAIRS])]


def test_a_missing_gold_is_a_fault_of_the_data_and_not_a_wrong_answer(maths: RewardPool) -> None:
    (result,) = maths.grade([sample("\\boxed{4}", answer=" ")])
    assert result.value is None and "gold answer" in result.fault


def test_the_answer_that_was_read_comes_back_with_the_reward(maths: RewardPool) -> None:
    assert maths.grade([sample("so \\boxed{4}")])[0] == RewardResult(1.0, answer="4")
