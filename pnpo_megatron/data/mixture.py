"""Prompt files with weights: every batch holds each file's share, and every file keeps its own order."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pnpo_megatron.data.prompts import LoadedPrompts, PromptSource
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.types import Prompt


class Mixture:
    """Draws from several orders like one `PromptSource`; next comes the file that is furthest behind."""

    def __init__(self, sources: Sequence[PromptSource], weights: Sequence[float]) -> None:
        """One weight a source."""
        self._sources, self._weights = list(sources), list(weights)
        self._drawn = [0] * len(sources)

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)

    def take(self, n: int, exclude: Collection[str] = ()) -> list[Prompt]:
        """The next n prompts, as `PromptSource.take`."""
        order = [self._next() for _ in range(n)]
        for index, source in enumerate(self._sources):
            if not exclude and order.count(index) > len(source):
                raise ConfigError(
                    f"data.weights = {self._weights} takes {order.count(index)} different prompts a batch "
                    f"from file {index + 1} of data.prompts, which holds {len(source)}; lower its weight or "
                    "rollout.prompts"
                )
        taken = [
            iter(source.take(order.count(index), exclude) if index in order else [])
            for index, source in enumerate(self._sources)
        ]
        drawn = [next(taken[index], None) for index in order]
        return [prompt for prompt in drawn if prompt is not None]

    def fork(self) -> Mixture:
        """An order that goes on from here, while this one stays."""
        twin = Mixture([source.fork() for source in self._sources], self._weights)
        twin._drawn = list(self._drawn)
        return twin

    @property
    def position(self) -> dict[str, Any]:
        """Where the orders stand: JSON values only."""
        files = [source.position for source in self._sources]
        names = repr([self._weights, [file["fingerprint"] for file in files]])
        fingerprint = hashlib.sha256(names.encode()).hexdigest()[:16]
        return {"files": files, "drawn": list(self._drawn), "fingerprint": fingerprint}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            ConfigError: it was saved with other files, weights, another seed or another order.
        """
        if position["fingerprint"] != self.position["fingerprint"]:
            raise ConfigError(
                "the checkpoint was written with other prompts, data.weights, seed or data.shuffle: the data "
                "position does not fit. Use the settings of that run, or start a new run folder"
            )
        for source, one in zip(self._sources, position["files"], strict=True):
            source.restore(one)
        self._drawn = list(position["drawn"])

    def _next(self) -> int:
        """Smallest (drawn + 1) / weight: shares are met within one prompt at every point of the order."""
        waits = [(drawn + 1) / weight for drawn, weight in zip(self._drawn, self._weights, strict=True)]
        index = waits.index(min(waits))
        self._drawn[index] += 1
        return index


def make_source(
    loaded: LoadedPrompts, weights: Sequence[float], *, seed: int, shuffle: bool
) -> PromptSource | Mixture:
    """One order over all prompts, or one a file where the files have weights."""
    if not weights:
        return PromptSource(loaded.prompts, seed=seed, shuffle=shuffle)
    pairs = list(zip(loaded.prompts, loaded.files, strict=True))
    parts = [[prompt for prompt, file in pairs if file == index] for index in range(len(weights))]
    return Mixture([PromptSource(part, seed=seed, shuffle=shuffle) for part in parts], weights)
