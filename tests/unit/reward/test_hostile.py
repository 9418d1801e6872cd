"""Text from a model may be anything: it costs bounded time, never crashes, and is never run."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pnpo_megatron.reward.math_answer import grade
from pnpo_megatron.reward.pool import RewardPool
from pnpo_megatron.reward.symbolic import too_costly
from pnpo_megatron.reward.time_limit import TimeLimitError, time_limit
from pnpo_megatron.reward_types import RewardInput

CPU_LIMIT_S = 8.0
HOSTILE = {
    "tower of powers": r"\boxed{9^{9^{9^{9}}}}",
    "tower in steps": r"\boxed{((((10^{99})^{99})^{99})^{99})}",
    "power of ten": r"\boxed{10^{1000000000}}",
    "leading zeros hide a size": r"\boxed{2^{0000000099999999}}",
    "factorials of factorials": r"\boxed{((((5!)!)!)!)}",
    "many factorial signs": r"\boxed{9!!!!!!}",
    "huge factorial": r"\boxed{99999999!}",
    "factorial of a product": r"\boxed{(900 \cdot 900 \cdot 900)!}",
    "endless sum": r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k}}",
    "endless product": r"\boxed{\prod_{k=1}^{99999999} k}",
    "expanding power": r"\boxed{(x+y+z+w)^{9999} + 1}",
    "nested roots": r"\boxed{" + r"\sqrt{1+" * 20 + "x" + "}" * 20 + "}",
    "a megabyte of open braces": r"\boxed{" + "{" * 1_000_000,
    "a megabyte of closed braces": r"\boxed{" + "{" * 500_000 + "34" + "}" * 500_000 + "}",
    "a megabyte of boxes": r"\boxed{" * 150_000 + "34",
    "a megabyte of closed boxes": r"\boxed{34}" * 100_000 + r"\boxed{35}",
    "a megabyte of labels": "Answer:\n" * 120_000,
    "a megabyte of spaces": "Answer:" + " " * 1_000_000 + "35",
    "a megabyte of backslashes": "\\boxed{" + "\\" * 1_000_000 + "}",
    "parentheses": r"\boxed{" + "(" * 9_000 + "35" + ")" * 9_000 + "}",
    "commas": r"\boxed{" + "1," * 9_000 + "}",
    "spaced digits and text": r"\boxed{" + "1 }" * 300 + r"\text{a" + "}",
    "null bytes": "\\boxed{3\x004}",
    "surrogates": "\\boxed{\ud83d 34}",
    "code": r"\boxed{__import__('os').system('touch pwned')}",
    "attributes": r"\boxed{().__class__.__bases__[0]}",
    "division by zero": r"\boxed{\frac{34}{0}}",
    "not a number": r"\boxed{nan}",
    "infinity less infinity": r"\boxed{\infty - \infty}",
    "a joiner with nothing behind it": r"\boxed{x<2\text{ or }}",
    "a union of nothing": r"\boxed{x<2\cup }",
    "superscripts": "\\boxed{34\u00b2}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_replies_are_wrong_within_seconds(text: str) -> None:
    start = time.process_time()
    verdict = grade(text, "34", timeout_s=2.0)
    assert not verdict.correct
    assert time.process_time() - start < CPU_LIMIT_S


@pytest.mark.parametrize(
    "text", [r"\frac{1}{2006!}", "2^{2^{10}}", "(3!)!", "x^{2005}-1", r"10^{100}", "e^{x^2}"]
)
def test_large_but_honest_formulas_are_not_refused(text: str) -> None:
    assert not too_costly(text)


PIECES = st.sampled_from(
    [
        "\\boxed{", "\\frac{", "\\sqrt{", "}", "{", "34", "1", "0", "x", "^", "_", "!", "\\pm ", ",",
        "(", ")", "[", "]", "\\cup ", "\\le ", "=", "\\text{ and }", "\\begin{pmatrix}",
        "\\end{pmatrix}", "&", "\\\\", "\\%", "\\infty", "-", "/", ".", ":", "\\sum_{k=1}^{9}",
        "Answer: ", "\n", "</think>", "$", " ", "\\sin ", "é", "\x00",
    ]
)  # fmt: skip
REPLIES = st.one_of(
    st.text(max_size=60),
    st.lists(PIECES, max_size=12).map("".join),
    st.lists(PIECES, max_size=9).map(lambda pieces: "\\boxed{" + "".join(pieces) + "}"),
)
GOLDS = st.sampled_from(
    ["34", "\\frac{1}{2}", "(1,2)", "[0,1)", "x^2-4", "1,-2", "\\text{east}", "2516_8", "28\\%"]
)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(text=REPLIES, gold=GOLDS)
def test_no_reply_crashes_the_grader_or_outlives_its_limit(text: str, gold: str) -> None:
    start = time.process_time()
    verdict = grade(text, gold, timeout_s=2.0)
    assert verdict.correct in (True, False)
    assert time.process_time() - start < CPU_LIMIT_S


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=10_000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(text=REPLIES, gold=GOLDS)
def test_ten_thousand_replies_neither_crash_the_grader_nor_outlive_its_limit(text: str, gold: str) -> None:
    start = time.process_time()
    assert grade(text, gold, timeout_s=2.0).correct in (True, False)
    assert time.process_time() - start < 2.0 + 1.0, "the limit, and the time to notice it"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hostile_replies_cost_a_grading_process_at_most_its_deadline_twice() -> None:
    """Once, and once more alone: the machine may have been busy. No verdict is a fault, none is right."""
    deadline = 5.0
    with RewardPool("math", workers=2, timeout_s=deadline) as pool:
        for name, text in HOSTILE.items():
            start = time.monotonic()
            (result,) = pool.grade([RewardInput("q", "34", text)])
            assert result.value == 0.0, (name, result)
            assert time.monotonic() - start < 2 * deadline + 30, f"{name}: deadlines and new processes"


@pytest.mark.parametrize("in_thread", [False, True])
def test_h03_the_time_limit_holds_in_any_thread_and_passes_through_broad_handlers(in_thread: bool) -> None:
    caught: list[bool] = []

    def work() -> None:
        try:
            with time_limit(0.3):
                while True:
                    try:
                        sum(range(100))
                    except Exception:
                        caught.append(False)
        except TimeLimitError:
            caught.append(True)

    if in_thread:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=30)
    else:
        work()
    assert caught == [True]


def test_leaving_in_time_leaves_nothing_behind() -> None:
    before = threading.active_count()
    for _ in range(50):
        with time_limit(5.0):
            pass
    end = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < end
    sum(range(100_000))  # an error that was set but not raised would surface here
