"""Prompt files to distinct, tokenised prompts, and the seeded order in which a run draws them."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pnpo_megatron.data.sources import Message, Row, read_rows
from pnpo_megatron.data.templates import Template
from pnpo_megatron.errors import ConfigError, DataError
from pnpo_megatron.seeds import derive_seed
from pnpo_megatron.types import Prompt


@dataclass(frozen=True)
class LoadSummary:
    """What became of the rows of a prompt file (TRAPS H05)."""

    rows: int
    duplicates: int
    """Rows that repeat a prompt and its gold, whatever their index."""
    conflicts: int
    """Rows of prompts that stand there with different golds."""
    overlong: int
    """Prompts with more than the allowed tokens."""
    kept: int
    conflicting: tuple[str, ...] = ()
    """Where each conflicting prompt stands."""

    def __str__(self) -> str:
        text = (
            f"{self.rows} rows: {self.duplicates} repeats merged, {self.conflicts} rows of "
            f"{len(self.conflicting)} "
            f"prompts with different golds dropped, {self.overlong} too long, {self.kept} prompts kept"
        )
        return text + (f". Different golds: {'; '.join(self.conflicting)}" if self.conflicting else "")


@dataclass(frozen=True)
class LoadedPrompts:
    """Distinct prompts in file order, with the count of what was left out."""

    prompts: list[Prompt]
    summary: LoadSummary
    template_fingerprint: str
    files: tuple[int, ...] = ()
    """Index of the file that each prompt came from."""


def load_prompts(
    path: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    template: str = "chat",
    conflicts: Literal["error", "drop"] = "error",
    max_prompt_tokens: int | None = None,
    system_prompt: str = "",
    template_kwargs: Mapping[str, Any] | None = None,
) -> LoadedPrompts:
    """Read, merge, render and tokenise a prompt file.

    Args:
        path: JSON Lines ``{"id", "problem", "answer"}`` or DAPO-Math-17k's parquet columns; several files are
            merged, and a prompt that stands in two counts for the first.
        template: ``chat``, ``raw`` or a Jinja file.
        conflicts: one prompt with two golds: ``error`` stops, ``drop`` leaves all its rows out.
        max_prompt_tokens: longer prompts are left out and counted; None keeps all.

    Raises:
        DataError: a bad row, conflicting golds, two prompts with one id, or nothing left.
        ConfigError: the template cannot be used.
    """
    form = Template(tokenizer, template, system_prompt, dict(template_kwargs or {}))
    paths = [path] if isinstance(path, str | Path) else list(path)
    distinct, counts = merge_rows(_rows_of(paths), conflicts=conflicts)
    _check_ids(distinct)
    pairs = [(make_prompt(row, form), row.file) for row in distinct]
    kept = [
        pair for pair in pairs if max_prompt_tokens is None or len(pair[0].token_ids) <= max_prompt_tokens
    ]
    summary = LoadSummary(**counts, overlong=len(pairs) - len(kept), kept=len(kept))
    for index, name in enumerate(paths):
        if not any(file == index for _, file in kept):
            raise DataError(
                f"{name}: no prompt is left ({summary}); raise rollout.max_prompt_tokens or check the file"
            )
    return LoadedPrompts([p for p, _ in kept], summary, form.fingerprint, tuple(file for _, file in kept))


def _rows_of(paths: Sequence[str | Path]) -> Iterator[Row]:
    for index, path in enumerate(paths):
        yield from (replace(row, file=index) if index else row for row in read_rows(Path(path)))


def merge_rows(
    rows: Iterable[Row], *, conflicts: Literal["error", "drop"]
) -> tuple[list[Row], dict[str, Any]]:
    """Distinct (prompt, gold) rows in file order, and the counts of `LoadSummary` so far.

    Raises:
        DataError: ``conflicts = "error"`` and a prompt stands there with different golds.
    """
    by_prompt: dict[tuple[Message, ...], dict[str, Row]] = {}
    times: dict[tuple[Message, ...], int] = {}
    for row in rows:
        by_prompt.setdefault(row.messages, {}).setdefault(row.answer.strip(), row)
        times[row.messages] = times.get(row.messages, 0) + 1
    clashing = {messages: golds for messages, golds in by_prompt.items() if len(golds) > 1}
    named = tuple(_describe(golds) for golds in clashing.values())
    if clashing and conflicts == "error":
        raise DataError(
            f"{len(clashing)} prompts have more than one gold answer: {'; '.join(named)}. Correct the file, "
            'or set data.conflicts = "drop" to leave them out'
        )
    distinct = [next(iter(golds.values())) for golds in by_prompt.values() if len(golds) == 1]
    dropped = sum(times[messages] for messages in clashing)
    total = sum(times.values())
    return distinct, {
        "rows": total,
        "duplicates": total - dropped - len(distinct),
        "conflicts": dropped,
        "conflicting": named,
    }


def _describe(golds: Mapping[str, Row]) -> str:
    first = next(iter(golds.values()))
    longest = max(
        first.messages[-1][1].split("\n\n"), key=len
    )  # past the instructions that all prompts share
    excerpt = " ".join(longest.split())[:60]
    places = ", ".join(f"{gold!r} at {row.where} (id {row.id})" for gold, row in golds.items())
    return f'"{excerpt}...": {places}'


def _check_ids(rows: Sequence[Row]) -> None:
    """Ids name seeds, groups and files, so two prompts may not share one."""
    seen: dict[str, str] = {}
    for row in rows:
        if row.id in seen:
            raise DataError(
                f"{row.where}: id {row.id!r} stands already at {seen[row.id]}; give every prompt its own"
            )
        seen[row.id] = row.where


def make_prompt(row: Row, template: Template) -> Prompt:
    """A row, rendered and tokenised once."""
    rendered = template.render(row.messages)
    return Prompt(
        id=row.id,
        token_ids=rendered.token_ids,
        answer=row.answer,
        text=rendered.text,
        problem=row.messages[-1][1],
        reasoning_open=rendered.reasoning_open,
        meta=row.meta,
    )


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
        usable = (
            sum(prompt.id not in excluded for prompt in self._prompts) if excluded else len(self._prompts)
        )
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


def _fingerprint(prompts: Sequence[Prompt], seed: int, shuffle: bool) -> str:
    """Names the prompts (ids, tokens and golds, so the template too), the seed and the order."""
    digest = hashlib.sha256(f"{seed}:{shuffle}".encode())
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.token_ids, prompt.answer)).encode())
    return digest.hexdigest()[:16]
