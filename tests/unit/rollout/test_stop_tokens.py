"""TRAPS H08: one stop set for the engine and the mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pnpo_megatron.rollout.stop_tokens import read_stop_token_ids


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_eos", "expected"),
    [
        ([7, 9], 9, 9, (7, 9)),
        (7, None, 9, (7, 9)),
        (None, [4, 3], None, (3, 4)),
        ("absent", "absent", 9, (9,)),
        ("absent", 2, None, (2,)),
        ("absent", "absent", None, ()),
        (0, 0, 0, (0,)),
    ],
)
def test_h08_the_stop_set_is_the_union_of_all_places_that_name_an_end(
    tmp_path: Path, generation: Any, config: Any, tokenizer_eos: int | None, expected: tuple[int, ...]
) -> None:
    for name, eos in (("generation_config.json", generation), ("config.json", config)):
        (tmp_path / name).write_text(json.dumps({} if eos == "absent" else {"eos_token_id": eos}))
    assert read_stop_token_ids(tmp_path, tokenizer_eos) == expected


def test_h08_a_folder_without_a_generation_config_still_has_its_end_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 11}')
    assert read_stop_token_ids(tmp_path, 12) == (11, 12)
