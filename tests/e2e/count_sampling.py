"""Writes down every batch that is sampled, so that a test can see whether one was paid for twice."""

from __future__ import annotations

from typing import Any

import pnpo_megatron.run


def arm() -> None:
    """In this process; the file is ``RUN/sampled``, one step a line."""
    inner = pnpo_megatron.run.Run._collect
    sample = pnpo_megatron.run.collect

    def noted(self: Any, step: int) -> Any:
        def counted(*args: Any) -> Any:
            with (self.config.run.folder / "sampled").open("a") as file:
                file.write(f"{step}\n")
            return sample(*args)

        pnpo_megatron.run.collect = counted
        return inner(self, step)

    pnpo_megatron.run.Run._collect = noted
