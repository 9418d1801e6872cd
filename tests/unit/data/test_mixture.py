"""Prompt files with weights: shares are met at once, orders are kept, positions resume."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from toy_tokenizer import toy_tokenizer

from pnpo_megatron.data.order import Mixture, PromptSource, make_source
from pnpo_megatron.data.prompts import load_prompts
from pnpo_megatron.errors import ConfigError, DataError
from pnpo_megatron.types import Prompt


def source(name: str, count: int) -> PromptSource:
    return PromptSource([Prompt(f"{name}{i}", (1,), "1") for i in range(count)], seed=3)


def mixture(weights=(3.0, 1.0), counts=(50, 20)) -> Mixture:
    return Mixture([source(name, n) for name, n in zip("ab", counts, strict=True)], weights)


@pytest.mark.parametrize("batch", [4, 5, 8])
def test_every_batch_holds_each_files_share_within_one_prompt(batch):
    mixed, drawn = mixture(), Counter()
    for number in range(1, 6):
        prompts = mixed.take(batch)
        assert len({prompt.id for prompt in prompts}) == batch
        drawn.update(prompt.id[0] for prompt in prompts)
        assert abs(drawn["a"] - 0.75 * batch * number) <= 1


def test_each_file_is_passed_through_whole_before_it_repeats():
    mixed = mixture(weights=(1.0, 1.0))
    seen = [prompt.id for _ in range(10) for prompt in mixed.take(4) if prompt.id[0] == "b"]
    assert len(seen) == 20 and len(set(seen)) == 20


def test_h31_a_saved_position_goes_on_with_the_same_prompts():
    whole, first = mixture(), mixture()
    expected = [prompt.id for _ in range(9) for prompt in whole.take(5)]
    found = [prompt.id for _ in range(4) for prompt in first.take(5)]
    second = mixture()
    second.restore(json.loads(json.dumps(first.position)))
    assert found + [prompt.id for _ in range(5) for prompt in second.take(5)] == expected
    with pytest.raises(ConfigError, match="data.weights"):
        mixture(weights=(2.0, 1.0)).restore(first.position)


def test_a_refill_holds_none_of_the_prompts_that_are_there():
    mixed = mixture(counts=(6, 6))
    taken = {prompt.id for prompt in mixed.take(6)}
    more = mixed.take(20, taken)
    assert taken.isdisjoint({prompt.id for prompt in more}) and len(more) <= 6


def test_a_file_too_small_for_its_share_is_refused_by_number():
    with pytest.raises(ConfigError, match="from file 2 of data.prompts, which holds 2"):
        mixture(weights=(1.0, 1.0), counts=(50, 2)).take(8)


def write(path, *rows):
    lines = [json.dumps({"id": name, "problem": text, "answer": gold}) for name, text, gold in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_files_are_merged_and_a_prompt_in_two_files_counts_for_the_first(tmp_path):
    one = write(tmp_path / "one.jsonl", ("a", "1+1", "2"), ("b", "1+2", "3"))
    two = write(tmp_path / "two.jsonl", ("c", "1+2", "3"), ("d", "2+2", "4"))
    loaded = load_prompts([one, two], toy_tokenizer(), template="raw")
    assert [prompt.id for prompt in loaded.prompts] == ["a", "b", "d"] and loaded.files == (0, 0, 1)
    assert loaded.summary.duplicates == 1
    assert isinstance(make_source(loaded, [1.0, 2.0], seed=1, shuffle=True), Mixture)
    assert isinstance(make_source(loaded, [], seed=1, shuffle=True), PromptSource)


def test_a_file_of_which_nothing_is_left_and_ids_that_two_files_share_are_named(tmp_path):
    one = write(tmp_path / "one.jsonl", ("a", "1+1", "2"))
    with pytest.raises(DataError, match="two.jsonl: no prompt is left"):
        load_prompts([one, write(tmp_path / "two.jsonl", ("b", "1+1", "2"))], toy_tokenizer(), template="raw")
    with pytest.raises(DataError, match="id 'a' stands already at .*one.jsonl"):
        load_prompts([one, write(tmp_path / "two.jsonl", ("a", "7", "2"))], toy_tokenizer(), template="raw")
