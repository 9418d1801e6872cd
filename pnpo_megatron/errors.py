"""Errors a person can act on. Each message says what was found, what was expected and what to type."""

from __future__ import annotations


class UserError(ValueError):
    """The user's input is wrong: exit code 2, one line."""


class ConfigError(UserError):
    """A setting, or a combination of settings, cannot work."""


class DataError(UserError):
    """A prompt or benchmark file cannot be used."""


class ConversionError(UserError):
    """A checkpoint or model configuration cannot be represented."""


class RolloutError(RuntimeError):
    """The rollout engine failed, died, or passed its deadline."""


class NoResponsesError(RolloutError):
    """Every prompt of a call was refused; the engine goes on."""


class MismatchError(RuntimeError):
    """Learner and engine disagree about the same weights."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, or none is left that can be trusted."""


class RewardFaultError(RuntimeError):
    """Too many rewards could not be computed."""


class TrainingFaultError(RuntimeError):
    """The run cannot go on: repeated non-finite updates, or a batch that cannot be filled."""
