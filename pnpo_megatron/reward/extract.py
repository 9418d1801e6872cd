r"""Where in a reply the final answer stands. Plain string scanning: nothing here reads mathematics.

The rules (TRAPS H02, H04): only text after the last ``</think>`` counts; the answer is the last complete
``\boxed{}`` or ``\fbox{}``, or the last ``Answer:`` line, whichever comes later. A reply that
stops inside its last box was cut off there and has no answer; it does not fall back to an earlier box.
"""

import re
from dataclasses import dataclass

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_TOKENS = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*\{?|\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s${}\\]+")
_LABEL = re.compile(
    r"^[ \t>*#_`~\-]*(?:(?:the|my|our|so|thus|hence|therefore|final|correct)[ \t,]+|最终|最后|正确)*"
    r"(?:answer|答案)[ \t*_]*[:：][ \t]*(?P<value>[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_ONLY_MARKUP = re.compile(r"[\s*_`#>]*")


@dataclass(frozen=True)
class Extracted:
    """The final answer as written, or None, and whether the reply stopped before it was done."""

    answer: str | None
    truncated: bool


@dataclass(frozen=True)
class _Span:
    start: int
    content: str | None
    """None: begun, never finished."""


def extract_answer(text: str, *, reasoning_open: bool = False, finish_reason: str | None = None) -> Extracted:
    """Find the final answer of a whole reply.

    Args:
        text: the reply, without the prompt.
        reasoning_open: the prompt already wrote ``<think>`` (TRAPS H07).
        finish_reason: ``"length"`` marks a reply that ran out of tokens; an ``Answer:`` line or
            bare box that runs into that end may have lost characters and does not count.
    """
    reasoning, closed, reply = text.rpartition(_THINK_CLOSE)
    still_thinking = _THINK_OPEN in reply or (reasoning_open and not closed)
    if still_thinking:
        return Extracted(None, truncated=True)
    cut = finish_reason == "length"
    candidates = [span for span in (_last_box(reply, cut), _last_line(reply, cut)) if span is not None]
    last = max(candidates, key=lambda span: span.start, default=_Span(-1, None))
    return Extracted(last.content, truncated=cut)


def _last_box(text: str, cut: bool) -> _Span | None:
    """The last box by start; brace-balanced, with escaped braces skipped. The outer of nested boxes."""
    stack: list[tuple[int, int] | None] = []  # a box: (start, content start); any other brace: None
    complete: list[tuple[int, int, int]] = []
    bare: _Span | None = None
    for token in _TOKENS.finditer(text):
        piece = token.group()
        if piece.startswith(("\\boxed", "\\fbox")):
            if piece.endswith("{"):
                stack.append((token.start(), token.end()))
            else:
                bare = _bare_box(text, token, cut)
        elif piece == "{":
            stack.append(None)
        elif piece == "}" and stack:
            box = stack.pop()
            if box is not None:
                complete = [span for span in complete[-1:] if span[0] < box[0]]  # drop those inside this one
                complete.append((box[0], box[1], token.start()))
    spans = [_Span(start, text[begin:end]) for start, begin, end in complete]
    spans += [_Span(box[0], None) for box in stack[::-1] if box is not None][:1]
    spans += [bare] if bare else []
    return max(spans, key=lambda span: span.start, default=None)


def _bare_box(text: str, token: re.Match[str], cut: bool) -> _Span:
    r"""``\boxed 204``: the run of characters up to a space or dollar sign."""
    run = _BARE.match(text, token.end())
    if run is None or (cut and run.end() == len(text)):
        return _Span(token.start(), None)
    return _Span(token.start(), run.group().rstrip(".,;:。，"))


def _last_line(text: str, cut: bool) -> _Span | None:
    """The last ``Answer:`` line with a value; a bare label takes the next line that has one."""
    for label in reversed(list(_LABEL.finditer(text))):
        start, end, value = label.start(), label.end(), label.group("value")
        if _ONLY_MARKUP.fullmatch(value):
            start, end, value = _next_line(text, end)
        if value and not re.search(r"\\(?:boxed|fbox)(?![A-Za-z])", value):  # a box speaks for itself
            return _Span(start, None if cut and end == len(text) else value)
    return None


def _next_line(text: str, end: int) -> tuple[int, int, str]:
    for line in re.finditer(r"[^\n]+", text[end : end + 2000]):
        if not _ONLY_MARKUP.fullmatch(line.group()):
            return end + line.start(), end + line.end(), line.group()
    return end, end, ""
