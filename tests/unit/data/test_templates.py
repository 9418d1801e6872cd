"""From a conversation to token ids: one BOS, one rendering for sampling, training and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy_tokenizer import BOS, CHAT, EOS, WORDS, toy_tokenizer

from pnpo_megatron.data.order import PromptSource
from pnpo_megatron.data.prompts import load_prompts, make_prompt
from pnpo_megatron.data.sources import Row
from pnpo_megatron.data.templates import Template, load_tokenizer
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.eval.benchmarks import load_benchmark

BOS_ID, EOS_ID = WORDS.index(BOS), WORDS.index(EOS)
QUESTION = (("user", "add one two"),)


def words(ids: tuple[int, ...]) -> str:
    return " ".join(WORDS[index] for index in ids)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_h06_a_template_that_writes_the_bos_gives_exactly_one(adds_bos: bool) -> None:
    rendered = Template(toy_tokenizer(adds_bos=adds_bos)).render(QUESTION)
    assert words(rendered.token_ids) == "<s> user : add one two assistant :"


@pytest.mark.parametrize(("adds_bos", "count"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("kind", ["chat", "raw", "file"])
def test_h06_without_a_bos_in_the_template_there_are_as_many_as_the_tokenizer_wants(
    kind: str, adds_bos: bool, count: int, tmp_path: Path
) -> None:
    source = CHAT.replace("{{ bos_token }}", "")
    tokenizer = toy_tokenizer(adds_bos=adds_bos, chat_template=source)
    if kind == "file":
        kind = str(tmp_path / "form.jinja")
        Path(kind).write_text(source)
    ids = Template(tokenizer, kind).render(QUESTION).token_ids
    assert ids.count(BOS_ID) == count and ids[:count] == (BOS_ID,) * count
    assert EOS_ID not in ids  # the post-processor's end mark is not part of a prompt


def test_h06_training_and_evaluation_prompts_are_the_same_ids(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"id": "a", "problem": "add one two", "answer": "3"}\n')
    tokenizer = toy_tokenizer()
    (trained,) = load_prompts(path, tokenizer).prompts
    (evaluated,) = load_benchmark(path, tokenizer).problems
    again = tokenizer(trained.text, add_special_tokens=False)["input_ids"]
    assert trained.token_ids == evaluated.token_ids == tuple(again)


def test_h06_a_template_that_writes_the_bos_twice_is_refused() -> None:
    doubled = toy_tokenizer(chat_template="{{ bos_token }} " + CHAT)
    with pytest.raises(ConfigError, match="twice"):
        Template(doubled).render(QUESTION)


@pytest.mark.parametrize(
    ("ending", "is_open"),
    [("", False), ("<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False)],
)
def test_h07_an_open_think_tag_at_the_end_of_the_prompt_is_noticed(ending: str, is_open: bool) -> None:
    rendered = Template(toy_tokenizer(chat_template=CHAT + ending)).render(QUESTION)
    assert rendered.reasoning_open is is_open


def test_h07_every_change_of_the_template_changes_the_fingerprint_of_the_prompts(tmp_path: Path) -> None:
    """A run that is resumed with it is refused (`PromptSource.restore`)."""
    tokenizer = toy_tokenizer()
    file = tmp_path / "form.jinja"
    file.write_text(CHAT + "<think>")
    row = Row("a", QUESTION, "3", "here")
    forms = [
        Template(tokenizer),
        Template(tokenizer, str(file)),
        Template(tokenizer, system_prompt="be brief"),
        Template(tokenizer, "raw"),
    ]
    named = [PromptSource([make_prompt(row, form)], seed=0).position["fingerprint"] for form in forms]
    assert len(set(named)) == len(forms)
    assert PromptSource([make_prompt(row, Template(tokenizer))], seed=0).position["fingerprint"] == named[0]


def test_system_prompt_and_extra_variables_reach_the_template() -> None:
    tokenizer = toy_tokenizer(chat_template=CHAT + "{% if brief %}be brief{% endif %}")
    rendered = Template(tokenizer, "chat", "be brief", {"brief": True}).render(QUESTION)
    assert words(rendered.token_ids) == "<s> system : be brief user : add one two assistant : be brief"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "raw", "system_prompt": "be brief"}, "system_prompt"),
        ({"kind": "raw", "kwargs": {"brief": True}}, "template_kwargs"),
        ({"kind": "nowhere.jinja"}, "no such file"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Template(toy_tokenizer(), **settings)


def test_a_chat_template_that_is_missing_is_named_with_what_works() -> None:
    with pytest.raises(ConfigError, match='no chat template.*"raw"'):
        Template(toy_tokenizer(chat_template=None))


def test_a_template_file_cannot_reach_outside_its_sandbox(tmp_path: Path) -> None:
    file = tmp_path / "form.jinja"
    file.write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ConfigError, match="SecurityError"):
        Template(toy_tokenizer(), str(file)).render(QUESTION)


def test_a_template_with_an_unknown_variable_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "form.jinja"
    file.write_text("{{ quesiton }}")
    with pytest.raises(ConfigError, match="quesiton"):
        Template(toy_tokenizer(), str(file)).render(QUESTION)


def test_a_saved_tokenizer_loads_from_its_folder_and_a_missing_one_is_named(tmp_path: Path) -> None:
    toy_tokenizer().save_pretrained(tmp_path / "model")
    assert Template(load_tokenizer(tmp_path / "model")).render(QUESTION).token_ids[0] == BOS_ID
    with pytest.raises(ConfigError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(tmp_path / "empty")
