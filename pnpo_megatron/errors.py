"""Errors a person can act on. Each message says what was found, what was expected and what to type."""

DONE, FAILED, WRONG_INPUT, STOPPED_EARLY = 0, 1, 2, 75
"""Exit codes of the command line; 75 is a run that stopped early with a checkpoint."""


class UserError(ValueError):
    """The user's input is wrong: exit code 2, one line."""


class ConfigError(UserError):
    """A setting, or a combination of settings, cannot work."""


class DataError(UserError):
    """A prompt or benchmark file cannot be used."""


class ConversionError(UserError):
    """A checkpoint or model configuration cannot be represented."""


class Fault(RuntimeError):
    """The run could not go on: exit code 1, one line, which says all that a person needs."""


class RolloutError(Fault):
    """The rollout engine failed, died, or passed its deadline."""


class NoResponsesError(RolloutError):
    """Every prompt of a call was refused; the engine goes on."""


class MismatchError(Fault):
    """Learner and engine disagree about the same weights."""


class CheckpointError(Fault):
    """A checkpoint could not be saved, or none is left that can be trusted."""


class RewardFaultError(Fault):
    """Too many rewards could not be computed."""


class TrainingFaultError(Fault):
    """The run cannot go on: repeated non-finite updates, or a batch that cannot be filled."""
