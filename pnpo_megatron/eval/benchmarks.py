"""Benchmark files to problems, through the same template code as training prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pnpo_megatron.data.prompts import load_prompts
from pnpo_megatron.errors import DataError
from pnpo_megatron.types import Prompt


@dataclass(frozen=True)
class Benchmark:
    """Distinct problems under the name that metrics carry."""

    name: str
    problems: tuple[Prompt, ...]


def load_benchmark(
    path: str | Path,
    tokenizer: Any,
    *,
    template: str = "chat",
    max_prompt_tokens: int | None = None,
    system_prompt: str = "",
    template_kwargs: Mapping[str, Any] | None = None,
) -> Benchmark:
    """Read a benchmark; its name is the file's, without the ending.

    Repeated problems are merged (TRAPS H05: published AIME files hold each problem 32 times). Nothing else
    is left out: a score on part of a benchmark is not a score.

    Raises:
        DataError: a bad row, two golds for one problem, or a problem longer than `max_prompt_tokens`.
    """
    loaded = load_prompts(
        path,
        tokenizer,
        template=template,
        conflicts="error",
        system_prompt=system_prompt,
        template_kwargs=template_kwargs,
    )
    longest = max(loaded.prompts, key=lambda prompt: len(prompt.token_ids))
    if max_prompt_tokens is not None and len(longest.token_ids) > max_prompt_tokens:
        raise DataError(
            f"{path}: problem {longest.id!r} takes {len(longest.token_ids)} tokens, more than "
            f"rollout.max_prompt_tokens = {max_prompt_tokens}; use {len(longest.token_ids)} or more, or "
            "leave this benchmark out"
        )
    return Benchmark(Path(path).stem, tuple(loaded.prompts))
