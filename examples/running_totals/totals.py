"""The task: thirteen one-digit numbers added one by one, with every running total written down.

The prompt names each number: ``a7b5c8...m3=``. A right answer starts ``b5+7=12,c8+12=20`` and ends in a line
``Answer: 64``: about 105 tokens, in which a slip is carried on to the end. As in examples/arithmetic_cpu, the
base model learns how a careless person works them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ANSWER = "\nAnswer: "
NAMES = "abcdefghijklm"
SYMBOLS = [*"0123456789+=,", ANSWER, *NAMES]
"""All the text there is: one token each."""
TOKENS = 112
"""Room for a response: a worked answer has 100 to 110."""
POSITIONS = 160
STEPS = 600
"""Of the base model's training."""


@dataclass(frozen=True)
class Slips:
    """Chance of each mistake, wherever it can be made."""

    total: float = 0.05
    """A running total is off by one."""
    number: float = 0.03
    """The number after the one that is due is added."""


CARELESS, NO_SLIPS = Slips(), Slips(0.0, 0.0)


@dataclass(frozen=True)
class Totals:
    """Three sets of thirteen numbers each; no prompt is in two of them."""

    base: list[tuple[int, ...]]
    prompts: list[tuple[int, ...]]
    heldout: list[tuple[int, ...]]


def split(seed: int, base: int = 20_000, prompts: int = 1600, heldout: int = 256) -> Totals:
    """Draw the three sets; the counts are of prompts."""
    rng = random.Random(seed)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < base + prompts + heldout:
        drawn[tuple(rng.randrange(1, 10) for _ in NAMES)] = None
    rows = list(drawn)
    return Totals(rows[heldout + prompts :], rows[heldout : heldout + prompts], rows[:heldout])


def prompt(*numbers: int) -> str:
    """What the model is asked."""
    return "".join(f"{name}{number}" for name, number in zip(NAMES, numbers, strict=True)) + "="


def worked(*numbers: int, slips: Slips, rng: random.Random) -> str:
    """A worked answer. Later steps go on from what was written, so one slip makes the answer wrong."""
    total, steps = numbers[0], []
    for place in range(1, len(numbers)):
        taken = place + (place + 1 < len(numbers) and rng.random() < slips.number)
        right = total + numbers[taken]
        off = rng.choice((-1, 1)) if rng.random() < slips.total else 0
        steps.append(f"{NAMES[place]}{numbers[taken]}+{total}={right + off}")
        total = right + off
    return f"{','.join(steps)}{ANSWER}{total}"
