"""What a reward function sees and returns. Light on purpose: grading workers import this and not torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RewardInput:
    """All that a reward function may look at."""

    prompt: str
    answer: str
    text: str
    finish_reason: str | None = None
    reasoning_open: bool = False
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """``value`` is None for a fault, which is never a wrong answer (DECISIONS: Denominators)."""

    value: float | None
    timed_out: bool = False
    fault: str = ""
    answer: str | None = None
    """What the maths grader read as the final answer; None for other functions."""
