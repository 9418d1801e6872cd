"""Intervals and inequalities of one variable, in one form."""

from __future__ import annotations

import re

from pnpo_megatron.reward.normalise import clean, closing, split_top

JOINERS = re.compile(r",?\s*(?:\\text\s*\{\s*(?:and|or|，|和|或)\s*\}|(?<=[\d})\] ])\b(?:and|or)\b)\s*")
"""Words and commas between the parts of an answer."""
SIDE = re.compile(r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\lt(?![A-Za-z])|\\gt(?![A-Za-z])|<|>)\s*(=?)")
"""A sign of an inequality, and whether it is followed by an equals sign."""
Bounds = tuple[str, str, str, str, str]
"""Bracket, low, high, bracket, and the variable, if it is named."""


def as_union(text: str) -> str:
    r"""``x < 2 or x > 3`` as ``(-\infty,2)\cup(3,\infty)``; any other text unchanged."""
    parts = [bounds(clean(part)) for part in JOINERS.split(text)] if SIDE.search(text) else []
    if len(parts) < 2 or None in parts or "," in JOINERS.sub("", text):
        return text
    known = [part for part in parts if part is not None]
    return r"\cup ".join(f"{left}{low},{high}{right}" for left, low, high, right, _ in known)


def bounds(text: str) -> Bounds | None:
    """Of an interval or an inequality of one variable; None for anything else."""
    if text.startswith(("(", "[")) and text[-1] in ")]" and closing(text, 0) == len(text) - 1:
        ends = split_top(text[1:-1])
        return (text[0], clean(ends[0]), clean(ends[1]), text[-1], "") if len(ends) == 2 else None
    if "," in text or "=" in re.sub(r"[<>]\s*=", "", text):
        return None
    pieces = SIDE.split(text)
    sides = [("<" if re.match(r"<|\\l", s) else ">", bool(e) or s in ("\\le", "\\ge"))
             for s, e in zip(pieces[1::3], pieces[2::3], strict=True)]  # fmt: skip
    return _chain([clean(piece) for piece in pieces[0::3]], sides)


def _chain(terms: list[str], sides: list[tuple[str, bool]]) -> Bounds | None:
    """``a <= x < b``, ``x > a`` and their mirror images."""
    if len(terms) == 2 and _is_variable(terms[1]) and not _is_variable(terms[0]):
        terms, sides = terms[::-1], [("<" if sides[0][0] == ">" else ">", sides[0][1])]
    if len(terms) == 2 and _is_variable(terms[0]) and not _is_variable(terms[1]):
        name, bound = terms
        way, closed = sides[0]
        if way == "<":
            return "(", r"-\infty", bound, "]" if closed else ")", name
        return "[" if closed else "(", bound, r"\infty", ")", name
    if len(terms) == 3 and _is_variable(terms[1]) and sides[0][0] == sides[1][0]:
        if sides[0][0] == ">":
            terms, sides = terms[::-1], sides[::-1]
        return ("[" if sides[0][1] else "(", terms[0], terms[2], "]" if sides[1][1] else ")", terms[1])
    return None


def _is_variable(text: str) -> bool:
    named = re.fullmatch(r"[A-Za-z](?:_\{?\w+\}?)?|\\[a-z]+", text)
    return named is not None and text not in (r"\pi", r"\infty", "e", "i")
