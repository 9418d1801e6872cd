"""Reward functions that misbehave in every way the pool must survive. Imported by grading workers."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pnpo_megatron.reward_types import RewardInput


def scripted(sample: RewardInput) -> object:
    """Does what the text says."""
    actions = {
        "hang": _hang,
        "die": lambda: os._exit(3),
        "nan": lambda: float("nan"),
        "inf": lambda: float("inf"),
        "none": lambda: None,
        "word": lambda: "1.0",
        "raise": _fail,
        "exit": sys.exit,
        "stop signal": _signal_itself,
        "has torch": lambda: float("torch" in sys.modules),
        "hog": lambda: float(len(bytearray(1 << 40))),
    }
    if sample.text.startswith("slow first:"):
        return _slow_the_first_time(Path(sample.text.partition(":")[2]))
    return actions[sample.text]() if sample.text in actions else len(sample.text) / 10


def half(sample: RewardInput) -> float:
    return 0.5


NOT_A_FUNCTION = 3


def _hang() -> None:
    while True:
        time.sleep(0.01)


def _fail() -> None:
    raise KeyError("lost")


def _signal_itself() -> float:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    return 1.0


def _slow_the_first_time(marker: Path) -> float:
    if not marker.exists():
        marker.touch()
        _hang()
    return 1.0
