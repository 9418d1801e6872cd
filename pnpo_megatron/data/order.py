"""The seeded order in which a run draws its prompts: one over all of them, or one a file with weights."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pnpo_megatron.data.prompts import LoadedPrompts
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.seeds import derive_seed
from pnpo_megatron.types import Prompt


class PromptSource:
    """Draws prompts in a seeded order, pass after pass; its position is part of the run state (TRAPS H31).

    Every data pass holds every prompt once. One batch never holds a prompt twice: at the border of two
    passes, a prompt that the batch already holds waits for the next batch.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        """`shuffle` False keeps the file's order in every pass."""
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._pass, self._offset = 0, 0
        self._deferred: list[int] = []
        self._order = self._order_of(0)
        self._fingerprint = _fingerprint(self._prompts, seed, shuffle)

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, n: int, exclude: Collection[str] = ()) -> list[Prompt]:
        """The next n prompts, all different.

        Args:
            exclude: ids that a batch to refill holds already: none of them comes, and fewer than n prompts
                if there are no more.

        Raises:
            ConfigError: there are not that many different prompts, without `exclude`.
        """
        excluded = set(exclude)
        usable = sum(prompt.id not in excluded for prompt in self._prompts)
        n = min(n, usable) if excluded else n
        if not excluded and not 0 < n <= usable:
            raise ConfigError(
                f"a batch of {n} different prompts was asked for and {usable} are there; "
                f"use rollout.prompts = {max(usable, 1)} or fewer, or a longer prompt file"
            )
        taken: list[int] = []
        waiting, self._deferred = self._deferred, []
        held: set[int] = set()
        while len(taken) < n:
            index = waiting.pop(0) if waiting else self._advance()
            if index in held or self._prompts[index].id in excluded:
                self._deferred.append(index)
            else:
                held.add(index)
                taken.append(index)
        self._deferred += waiting
        return [self._prompts[index] for index in taken]

    def fork(self) -> PromptSource:
        """An order that goes on from here, while this one stays."""
        twin = copy.copy(self)
        twin.restore(self.position)
        return twin

    @property
    def position(self) -> dict[str, Any]:
        """Where the order stands: JSON values only."""
        return {
            "pass": self._pass,
            "offset": self._offset,
            "deferred": list(self._deferred),
            "fingerprint": self._fingerprint,
        }

    def restore(self, position: Mapping[str, Any]) -> None:
        """Go on from a saved position. Batches may have another size from here on: the order does not
        depend on it.

        Raises:
            ConfigError: the position was saved with other prompts, another seed or another order.
        """
        if position["fingerprint"] != self._fingerprint:
            raise ConfigError(
                "the checkpoint was written with other prompts, another seed or another data.shuffle: the "
                "data position does not fit. Use the prompt file and settings of that run, or start a new "
                "run folder"
            )
        self._pass, self._offset = int(position["pass"]), int(position["offset"])
        self._deferred = [int(index) for index in position["deferred"]]
        self._order = self._order_of(self._pass)

    def _advance(self) -> int:
        if self._offset == len(self._order):
            self._pass, self._offset = self._pass + 1, 0
            self._order = self._order_of(self._pass)
        index = self._order[self._offset]
        self._offset += 1
        return index

    def _order_of(self, data_pass: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(derive_seed(self._seed, "data", data_pass)).shuffle(order)
        return order


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


def _fingerprint(prompts: Sequence[Prompt], seed: int, shuffle: bool) -> str:
    """Names the prompts (ids, tokens and golds, so the template too), the seed and the order."""
    digest = hashlib.sha256(f"{seed}:{shuffle}".encode())
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.token_ids, prompt.answer)).encode())
    return digest.hexdigest()[:16]
