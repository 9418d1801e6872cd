"""A word-level tokenizer that begins every text with a BOS, and one that does not."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
WORDS = [
    "<unk>",
    BOS,
    EOS,
    "<think>",
    "</think>",
    "user",
    "assistant",
    "system",
    "add",
    "one",
    "two",
    "be",
    "brief",
    ":",
]
CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] }} : {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def toy_tokenizer(*, adds_bos: bool = True, chat_template: str | None = CHAT) -> Any:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A {EOS}", special_tokens=list(zip((BOS, EOS), (1, 2), strict=True))
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, unk_token="<unk>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
