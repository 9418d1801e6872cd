"""A disk that is full at one save, with or without room again at the next."""

from __future__ import annotations

import errno
from typing import Any

from pnpo_megatron.policy import checkpoint_save


def at_the_second_save(last: bool = False) -> None:
    """In this process; `last`: at all that come after it, too."""
    inner, calls = checkpoint_save._write_bucket, []

    def full(*args: Any) -> list[Any]:
        calls.append(None)
        if len(calls) == 2 or (last and len(calls) > 2):
            raise OSError(errno.ENOSPC, "No space left on device")
        return inner(*args)

    checkpoint_save._write_bucket = full


def from_the_second_save_on() -> None:
    """In this process."""
    at_the_second_save(last=True)
