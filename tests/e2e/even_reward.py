"""A reward that a random model earns now and then, so that tiny runs have something to learn from."""

from __future__ import annotations

from pnpo_megatron.types import RewardInput


def even_digits(sample: RewardInput) -> float:
    """1 when more than half of the response's characters are even digits."""
    even = sum(character in "02468" for character in sample.text)
    return float(2 * even > len(sample.text))
