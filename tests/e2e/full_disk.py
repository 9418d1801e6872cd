"""A disk that is full at one save and has room again at the next."""

from __future__ import annotations

import errno
from typing import Any

from pnpo_megatron.policy import checkpoint_save


def at_the_second_save() -> None:
    """In this process."""
    inner, calls = checkpoint_save._write_bucket, []

    def full(*args: Any) -> list[Any]:
        calls.append(None)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return inner(*args)

    checkpoint_save._write_bucket = full
