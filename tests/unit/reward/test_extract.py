"""Where the final answer stands: boxes, answer lines, and what counts as unfinished."""

from __future__ import annotations

import pytest

from pnpo_megatron.reward.extract import Extracted, extract_answer
from pnpo_megatron.reward.math_answer import grade


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{200}. wait, \boxed{204}", "204"),
        (r"\boxed{200} and \boxed{204}", "204"),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{{{{5}}}}", "{{{5}}}"),
        (r"\fbox{7}", "7"),
        (r"\boxed 204.", "204"),
        (r"$\boxed5$", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"$$\boxed{9}$$", "9"),
        (r"\boxed{3} and {more} braces }", "3"),
        (r"{ \boxed{3}", "3"),
        (r"\boxed{3} then \boxed{4", None),
        (r"\boxed{3} then \boxed", None),
        (r"\boxedly{3}", None),
        ("nothing here", None),
    ],
)
def test_h02_the_last_complete_box_is_the_answer_and_an_unfinished_one_is_none(
    text: str, answer: str | None
) -> None:
    assert extract_answer(text).answer == answer


def test_h02_two_boxes_close_together_are_not_glued() -> None:
    text = r"\boxed{200}. wait, \boxed{204}"
    assert grade(text, "204").correct and not grade(text, "200").correct and not grade(text, "200204").correct


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 34", "34"),
        ("**Answer:** 34", "** 34"),
        ("### Final Answer: 34\n", "34"),
        ("> answer : 34", "34"),
        ("So the answer: 34", "34"),
        ("Answer:\n\n34", "34"),
        ("Answer: 34\nAnswer: 35", "35"),
        ("\\boxed{34}\nAnswer: 35", "35"),
        ("Answer: 34, so \\boxed{35}", "35"),
        ("Answer: \\boxed{35}", "35"),
        ("Answer: \\boxed{35", None),
        ("最终答案：34", "34"),
        ("答案: 34", "34"),
        ("Check the answer: it is fine. \\boxed{3}", "3"),
        ("\\boxed{3}. Check the answer: it is fine.", "3"),
        ("Answer:", None),
    ],
)
def test_the_last_answer_line_or_box_wins_whichever_is_later(text: str, answer: str | None) -> None:
    assert extract_answer(text).answer == answer


@pytest.mark.parametrize(
    ("text", "correct", "truncated"),
    [
        ("<think>so the answer is \\boxed{204} but let me ver", False, True),
        ("<think>maybe 204 ... and then cut", False, True),
        ("<think>it is \\boxed{204}</think> hence \\boxed{204}", True, False),
        ("<think>it is \\boxed{204}</think> hence \\boxed{205}", False, False),
        ("<think>it is \\boxed{204}</think> hence", False, False),
        ("<think>a</think>\\boxed{1}<think>\\boxed{204}", False, True),
    ],
)
def test_h04_nothing_inside_unfinished_reasoning_is_an_answer(
    text: str, correct: bool, truncated: bool
) -> None:
    verdict = grade(text, "204")
    assert (verdict.correct, verdict.truncated) == (correct, truncated)


@pytest.mark.parametrize("opened_by_the_prompt", [False, True])
def test_h07_the_tag_may_stand_in_the_prompt_or_in_the_reply(opened_by_the_prompt: bool) -> None:
    tag = "" if opened_by_the_prompt else "<think>"
    finished, cut = f"{tag}it is \\boxed{{9}}</think>\\boxed{{12}}", f"{tag}it is \\boxed{{12}}"
    assert grade(finished, "12", reasoning_open=opened_by_the_prompt).correct
    verdict = grade(cut, "12", reasoning_open=opened_by_the_prompt, finish_reason="length")
    assert (verdict.correct, verdict.answer, verdict.truncated) == (False, None, True)


def test_a_complete_answer_counts_although_the_reply_was_cut_later_and_a_line_that_may_be_cut_does_not() -> (
    None
):
    assert extract_answer("\\boxed{31}. One more", finish_reason="length") == Extracted("31", truncated=True)
    assert extract_answer("Answer: 31\nOne more", finish_reason="length") == Extracted("31", truncated=True)
    assert extract_answer("Answer: 3", finish_reason="length") == Extracted(None, truncated=True)  # 3 of 31?
    assert extract_answer("Answer: 3", finish_reason="stop") == Extracted("3", truncated=False)
