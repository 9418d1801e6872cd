"""Two constants of the step's model, from the paper's step times: 283 s at K = 1, 510 s at K = 4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pnpo_megatron.errors import ConfigError
from pnpo_megatron.planning.job import Job
from pnpo_megatron.planning.step_time import StepTime, predict

PAPER_ONE, PAPER_FOUR = 283.0, 510.0
PLAUSIBLE = {"mfu": (0.25, 0.5), "decode_share": (0.3, 0.8)}


def calibrated(job: Job, one: float = PAPER_ONE, four: float = PAPER_FOUR) -> Job:
    """`job` with the shares of FLOP/s and bandwidth that give `one` seconds at K = 1 and `four` at K = 4.

    Raises:
        ConfigError: no value in the plausible range does; the other assumptions do not describe these times.
    """
    job = _solve(job, "mfu", lambda time: time.update / job.epochs, (four - one) / 3)
    return _solve(job, "decode_share", lambda time: time.total - time.update, one - (four - one) / 3)


def _solve(job: Job, name: str, seconds: Callable[[StepTime], float], wanted: float) -> Job:
    """Bisection: seconds fall as the share grows."""
    low, high = PLAUSIBLE[name]

    def at(value: float) -> Job:
        assumed = replace(job.assumed, **{name: value})  # type: ignore[arg-type]
        return replace(job, assumed=assumed)

    if not seconds(predict(at(high))) <= wanted <= seconds(predict(at(low))):
        raise ConfigError(
            f"{wanted:.1f} s needs {name} outside {low} to {high} "
            f"({seconds(predict(at(high))):.1f} to {seconds(predict(at(low))):.1f} s)"
        )
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(predict(at(middle))) > wanted else (low, middle)
    return at(high)
