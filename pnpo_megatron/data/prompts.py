"""Prompt files to distinct, tokenised prompts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pnpo_megatron.data.sources import Message, Row, read_rows
from pnpo_megatron.data.templates import Template
from pnpo_megatron.errors import DataError
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
            f"{len(self.conflicting)} prompts with different golds dropped, {self.overlong} too long, "
            f"{self.kept} prompts kept"
        )
        return text + (f". Different golds: {'; '.join(self.conflicting)}" if self.conflicting else "")


@dataclass(frozen=True)
class LoadedPrompts:
    """Distinct prompts in file order, with the count of what was left out."""

    prompts: list[Prompt]
    summary: LoadSummary
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
    rows = (replace(row, file=index) for index, name in enumerate(paths) for row in read_rows(Path(name)))
    distinct, counts = merge_rows(rows, conflicts=conflicts)
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
    return LoadedPrompts([prompt for prompt, _ in kept], summary, tuple(file for _, file in kept))


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
    longest = max(first.messages[-1][1].split("\n\n"), key=len)  # past the instructions that all share
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
