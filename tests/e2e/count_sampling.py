"""Writes down every batch that is sampled, so that a test can see whether one was paid for twice."""

from __future__ import annotations

from typing import Any

from pnpo_megatron.run import batches


def arm() -> None:
    """In this process; the file is ``RUN/sampled``, one step a line."""
    inner = batches.Batches.take
    sample = batches.collect

    def noted(self: Any, step: int) -> Any:
        def counted(*args: Any) -> Any:
            with (self.config.run.folder / "sampled").open("a") as file:
                file.write(f"{step}\n")
            return sample(*args)

        batches.collect = counted
        return inner(self, step)

    batches.Batches.take = noted
