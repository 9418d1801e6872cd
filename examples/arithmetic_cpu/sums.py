"""The task: two-digit sums, worked digit by digit, and how a careless person works them.

A right answer to ``37+48=`` is ``7+8=15,3+4+1=8`` and a last line ``Answer: 85``. The base model learns from
workings with slips, so it knows the procedure and follows it carelessly: reinforcement has something to
sharpen, and what it sharpens holds for every sum.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ANSWER = "\nAnswer: "
SYMBOLS = [*"0123456789+=,", ANSWER]
"""All the text there is: one token each."""
TOKENS = 24
"""Room for a response: a worked answer has 17 to 20."""
POSITIONS = 64
STEPS = 350
"""Of the base model's training."""


@dataclass(frozen=True)
class Slips:
    """Chance of each mistake, wherever it can be made."""

    units: float = 0.28
    """The sum of the units is off by one."""
    carry: float = 0.40
    """A carry is forgotten."""
    tens: float = 0.28
    """The sum of the tens is off by one."""


CARELESS = Slips()
NO_SLIPS = Slips(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Sums:
    """Three sets without a common sum; a+b and b+a count as one."""

    base: list[tuple[int, int]]
    """For supervised training of the base model, both orders."""
    prompts: list[tuple[int, int]]
    """For reinforcement, both orders."""
    heldout: list[tuple[int, int]]
    """For evaluation only, one order each."""


def split(seed: int, prompts: int = 800, heldout: int = 256) -> Sums:
    """Cut the 4,095 unordered pairs of two-digit numbers in three; the counts are of pairs."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    held, rest = pairs[:heldout], pairs[heldout:]
    return Sums(base=_both_orders(rest[prompts:]), prompts=_both_orders(rest[:prompts]),
                heldout=[pair if rng.random() < 0.5 else pair[::-1] for pair in held])


def prompt(a: int, b: int) -> str:
    """What the model is asked."""
    return f"{a}+{b}="


def worked(a: int, b: int, slips: Slips, rng: random.Random) -> str:
    """A worked answer. Later steps go on from what was written, so one slip makes the answer wrong."""
    units = _off_by_one(a % 10 + b % 10, slips.units, rng)
    carried = units >= 10 and rng.random() >= slips.carry
    tens = _off_by_one(a // 10 + b // 10 + carried, slips.tens, rng)
    steps = f"{a % 10}+{b % 10}={units},{a // 10}+{b // 10}{'+1' if carried else ''}={tens}"
    return f"{steps}{ANSWER}{10 * tens + units % 10}"


def _off_by_one(value: int, chance: float, rng: random.Random) -> int:
    if rng.random() >= chance:
        return value
    return value + (1 if value == 0 else rng.choice((-1, 1)))


def _both_orders(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted({order for a, b in pairs for order in ((a, b), (b, a))})
