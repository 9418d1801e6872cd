"""Grade a reply to a mathematics problem against its gold answer.

Exact value decides: no floats, no rounding, integers of any size. Text from a model is never evaluated
as code.
"""

from dataclasses import dataclass

from pnpo_megatron.reward.compare import equal
from pnpo_megatron.reward.extract import extract_answer
from pnpo_megatron.reward.symbolic import load_math_verify
from pnpo_megatron.reward.time_limit import TimeLimitError, time_limit
from pnpo_megatron.reward_types import RewardInput

DEFAULT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Grade:
    """A verdict, the final answer as written (None: there is none), and whether the reply was cut short."""

    correct: bool
    answer: str | None
    truncated: bool
    timed_out: bool = False
    """The comparison did not finish in time; such an answer is wrong."""


def grade(
    response_text: str,
    gold: str,
    *,
    reasoning_open: bool = False,
    finish_reason: str | None = None,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
) -> Grade:
    """Compare the final answer of a reply with the gold, in any thread or process (TRAPS H01-H04, H07).

    Args:
        response_text: the whole reply, without the prompt.
        gold: the bare gold answer.
        reasoning_open: the prompt's template already wrote ``<think>``.
        finish_reason: ``"length"`` sets `truncated`; a complete answer is graded all the same.
        timeout_s: limit for the comparison; None leaves the limit to the caller.

    Raises:
        ValueError: the gold is not a non-empty string. That is the data's fault, never a wrong answer.
    """
    if not isinstance(gold, str) or not gold.strip():
        raise ValueError(
            f"gold answer is {gold!r}; expected a non-empty string. Fix the row in the data file"
        )
    found = extract_answer(response_text, reasoning_open=reasoning_open, finish_reason=finish_reason)
    if found.answer is None or not found.answer.strip():
        return Grade(False, None, found.truncated)
    load_math_verify()
    try:
        with time_limit(timeout_s):
            correct = equal(found.answer, gold)
    except TimeLimitError:
        return Grade(False, found.answer, found.truncated, timed_out=True)
    except (RecursionError, MemoryError):  # the answer is too deep or too big to be read: wrong, not a fault
        return Grade(False, found.answer, found.truncated)
    return Grade(correct, found.answer, found.truncated)


def grade_sample(sample: RewardInput) -> Grade:
    """The same of a sample; the caller sets the time limit."""
    return grade(
        sample.text,
        sample.answer,
        reasoning_open=sample.reasoning_open,
        finish_reason=sample.finish_reason,
        timeout_s=None,
    )
