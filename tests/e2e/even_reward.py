"""A reward of many values, so that every group of a random model's responses has something to teach."""

from __future__ import annotations

from pnpo_megatron.types import RewardInput


def even_digits(sample: RewardInput) -> float:
    """Even digits in the response."""
    return float(sum(character in "02468" for character in sample.text))
