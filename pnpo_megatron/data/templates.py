"""From a conversation to the token ids that are sampled from, trained on and evaluated: one place for
all three."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pnpo_megatron.data.sources import Message
from pnpo_megatron.errors import ConfigError


@dataclass(frozen=True)
class Rendered:
    """A prompt as text and as token ids (with exactly one BOS where the tokenizer wants one)."""

    text: str
    token_ids: tuple[int, ...]
    reasoning_open: bool


@dataclass(frozen=True)
class Template:
    """How conversations become prompts."""

    tokenizer: Any
    kind: str = "chat"
    """``chat`` (the tokenizer's own), ``raw`` (the last message as it stands) or a Jinja file."""
    system_prompt: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the template, e.g. ``{"enable_thinking": True}``."""

    def __post_init__(self) -> None:
        if self.kind == "raw" and (self.system_prompt or self.kwargs):
            raise ConfigError(
                'data.template = "raw" has no place for data.system_prompt or data.template_kwargs; '
                'remove them, or use "chat" or a Jinja file'
            )
        if self.kind == "chat" and not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                'data.template = "chat", but this tokenizer has no chat template; use "raw" or the path of '
                "a Jinja file"
            )
        if self.kind not in ("chat", "raw") and not Path(self.kind).is_file():
            raise ConfigError(
                f'data.template = "{self.kind}": no such file; use "chat", "raw" or a Jinja file'
            )

    def render(self, messages: Sequence[Message]) -> Rendered:
        """One conversation, ending where the model's reply begins.

        Raises:
            ConfigError: the template fails, or writes more than one BOS.
        """
        text = self._text(list(messages))
        return Rendered(text, self._encode(text), text.rstrip().endswith("<think>"))

    def _text(self, messages: list[Message]) -> str:
        if self.kind == "raw":
            return messages[-1][1]
        if self.system_prompt:
            if messages[0][0] == "system":
                raise ConfigError(
                    "data.system_prompt is set, but the rows bring their own system message; remove one"
                )
            messages = [("system", self.system_prompt), *messages]
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            if self.kind == "chat":
                return str(
                    self.tokenizer.apply_chat_template(
                        conversation, tokenize=False, add_generation_prompt=True, **self.kwargs
                    )
                )
            return self._from_file(conversation)
        except Exception as error:  # a template is a program of its own and may raise anything
            raise ConfigError(
                f"data.template = {self.kind!r} failed: {type(error).__name__}: {error}; try it on one "
                'prompt, or use "raw"'
            ) from error

    def _from_file(self, conversation: list[dict[str, str]]) -> str:
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False
        )
        template = environment.from_string(Path(self.kind).read_text(encoding="utf-8"))
        return template.render(
            messages=conversation,
            problem=conversation[-1]["content"],
            system_prompt=self.system_prompt,
            bos_token=self.tokenizer.bos_token or "",
            eos_token=self.tokenizer.eos_token or "",
            add_generation_prompt=True,
            **self.kwargs,
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        """Ids of rendered text. Special tokens are never added to it again (TRAPS H06): the BOS stands
        there already, or is put there once if the tokenizer begins every text with one. Never an EOS."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return tuple(ids)
        if ids[:1] != [bos] and self.tokenizer("a")["input_ids"][:1] == [bos]:
            ids.insert(0, bos)
        if ids[:2] == [bos, bos]:
            raise ConfigError(
                f"the prompt template writes the BOS token {self.tokenizer.bos_token!r} twice; remove one "
                "of them"
            )
        return tuple(ids)


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a Hugging Face folder; never runs code from it and never goes to the network.

    Raises:
        ConfigError: no such folder, or no tokenizer in it.
    """
    if not Path(folder).is_dir():
        raise ConfigError(
            f"model.hf = {folder}: no such folder; give a Hugging Face folder with tokenizer files"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.hf = {folder}: no usable tokenizer ({reason}); copy tokenizer.json there"
        ) from error
