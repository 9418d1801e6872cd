"""The set of token ids that end a response: the engine stops on it and the mask includes it (TRAPS H08)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pnpo_megatron.errors import ConfigError


def read_stop_token_ids(model_folder: Path, tokenizer_eos: int | None = None) -> tuple[int, ...]:
    """Every end-of-sequence id of a model, sorted: `eos_token_id` of generation_config.json and config.json
    (an int, a list, null or absent), and the tokenizer's own. Empty when none is given anywhere."""
    ids = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        file = model_folder / name
        if file.is_file():
            eos = json.loads(file.read_text()).get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return tuple(sorted(ids))


def stop_tokens(names: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """Ids of tokens given by name, e.g. ``<|im_end|>``.

    Raises:
        ConfigError: a name that is not one token of this tokenizer.
    """
    found = []
    for name in names:
        ids = tokenizer.encode(name, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(f"rollout.stop: {name!r} is {len(ids)} tokens of this model; name single ones")
        found += ids
    return tuple(found)
