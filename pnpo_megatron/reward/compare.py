"""Whether a final answer equals the gold, from cheap and exact to symbolic: text, numbers, lists, formulas;
intervals and inequalities are formulas."""

import re
from collections.abc import Iterator, Sequence

from pnpo_megatron.reward.normalise import (
    clean,
    closing,
    decimal_form,
    plain,
    rational,
    split_percent,
    split_top,
    without_unit,
)
from pnpo_megatron.reward.symbolic import symbolic_equal

MAX_PARTS = 64
MAX_ANSWER = 20_000
"""Characters; a longer "answer" is not one."""
MAX_FORMULA = 1_000
"""Characters of anything but plain digits."""
_JOINERS = re.compile(r",?\s*(?:\\text\s*\{\s*(?:and|or|，|和|或)\s*\}|(?<=[\d})\] ])\b(?:and|or)\b)\s*")
"""Words and commas between the parts of an answer."""
_BRANCHES = re.compile(rf"{_JOINERS.pattern}|\\cup(?![A-Za-z])")
_NAME = re.compile(r"^\s*\(?([A-Za-z](?:_\{?\w+\}?)?)\)?\s*(?:=|\\in(?![A-Za-z]))\s*(?=\S)")
_CLOCK = re.compile(r"\d{1,2}\s*:\s*\d\d(?!\d)")
_BASED = re.compile(r"(\d+)_\{?(\d+)\}?")
_RELATION = re.compile(r"\\(?:le|ge|lt|gt|ne|neq)(?![A-Za-z])|[<>=]")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def equal(answer: str, gold: str) -> bool:
    """Equal in exact value under the project's rules; formatting, units and separators do not matter."""
    if len(answer) > MAX_ANSWER:
        return False
    return _equal(clean(answer), clean(gold))


def _equal(answer: str, gold: str) -> bool:
    if not answer or not gold:
        return False
    if plain(answer) == plain(gold):
        return True
    if max(len(answer), len(gold)) > MAX_FORMULA:
        return decimal_form(answer) is not None and decimal_form(answer) == decimal_form(gold)
    for rule in (_words, _clock, _number, _based, _named, _union, _parts):
        verdict = rule(answer, gold)
        if verdict is not None:
            return verdict
    return symbolic_equal(_bare(answer), _bare(gold))


def _bare(text: str) -> str:
    """Without percent sign and unit; degrees inside a sine are no unit."""
    return text if _ANGLE.search(text) else without_unit(split_percent(text)[0])


def _words(answer: str, gold: str) -> bool | None:
    """Names and words, case aside; single letters keep their case (x is not X)."""
    left, right = plain(answer).strip("()").casefold(), plain(gold).strip("()").casefold()
    return True if len(left) > 1 and left == right and left.isalpha() else None


def _clock(answer: str, gold: str) -> bool | None:
    if not (_CLOCK.search(answer) or _CLOCK.search(gold)):
        return None
    left, right = (re.sub(r"[\s.]", "", plain(text)).casefold() for text in (answer, gold))
    return left == right


def _number(answer: str, gold: str) -> bool | None:
    """Exact numbers. A percent sign may be missing on one side; then its value may also be meant."""
    (left, left_percent), (right, right_percent) = split_percent(answer), split_percent(gold)
    left, right = without_unit(left), without_unit(right)
    long_left, long_right = decimal_form(left), decimal_form(right)
    if long_left is not None and long_left == long_right:
        return True
    first, second = rational(left), rational(right)
    if first is None or second is None:
        return False if long_left is not None and long_right is not None else None
    if left_percent != right_percent:
        scaled = (first / 100, second) if left_percent else (first, second / 100)
        return first == second or scaled[0] == scaled[1]
    return first == second


def _based(answer: str, gold: str) -> bool | None:
    """Numbers in another base, ``2516_8``; the base may be missing where the gold has one."""
    left, right = (_BASED.fullmatch(text.replace(" ", "")) for text in (answer, gold))
    if right is None:
        return None if left is None else _base_value(left) == rational(gold)
    if left is None:
        return decimal_form(answer) == decimal_form(right.group(1))
    return left.groups() == right.groups() or _base_value(left) == _base_value(right)


def _base_value(match: re.Match[str]) -> int | None:
    digits, base = match.group(1), match.group(2)
    if len(digits) > 1000 or len(base) > 2 or not 2 <= int(base) <= 10 or int(max(digits)) >= int(base):
        return None
    return int(digits, int(base))


def _named(answer: str, gold: str) -> bool | None:
    r"""``x = 5`` or ``x \in [0,1)`` against the value alone, or both with the same name."""
    left, right = _NAME.match(answer), _NAME.match(gold)
    if left is None and right is None:
        return None
    if left and right and left.group(1) != right.group(1):
        return None
    rests = [text[match.end() :] if match else text for text, match in ((answer, left), (gold, right))]
    if any("=" in rest or not rest for rest in rests):
        return None
    if left and right and re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", rests[1]):
        return None  # a line y = 2x + 3: an equation, left to the solver
    return _equal(clean(rests[0]), clean(rests[1]))


def _union(answer: str, gold: str) -> bool | None:
    r"""``x < 2 or x > 3`` against ``(-\infty,2) \cup (3,\infty)``, branch by branch."""
    if r"\cup" not in answer + gold or not _JOINERS.search(answer + gold):
        return None
    left, right = ([clean(part) for part in _BRANCHES.split(text)] for text in (answer, gold))
    return len(left) == len(right) and _one_to_one(left, right)


def _parts(answer: str, gold: str) -> bool | None:
    """Tuples in order; sets and lists of roots in any order, one to one."""
    if r"\begin" in answer or r"\begin" in gold:
        return None
    (left_kind, left), (right_kind, right) = _split(answer), _split(gold)
    if left_kind == right_kind == "one" or r"\cup" in answer + gold or r"\cap" in answer + gold:
        return None
    if max(len(left), len(right)) > MAX_PARTS or len(left) != len(right):
        return False if _enumerable(answer) and _enumerable(gold) else None
    if left_kind in _ORDERED or right_kind in _ORDERED:
        kinds = {left_kind, right_kind}
        return (len(kinds) == 1 or "list" in kinds) and all(map(_equal, left, right))
    return _one_to_one(left, right)


_ORDERED = ("()", "[]", "(]", "[)")


def _split(text: str) -> tuple[str, list[str]]:
    r"""A kind (``()`` and the other brackets, ``set``, ``list``, ``one``) and the members, both signs of
    ``\pm`` apart."""
    inner = re.fullmatch(r"\\\{(.*)\\\}", text)
    if inner:
        return "set", list(_members(inner.group(1)))
    if text.startswith(("(", "[")) and text[-1] in ")]" and closing(text, 0) == len(text) - 1:
        parts = [clean(part) for part in split_top(text[1:-1])]
        return (text[0] + text[-1], parts) if len(parts) > 1 else ("one", [text])
    parts = list(_members(text))
    return ("list" if len(parts) > 1 else "one"), parts


def _members(text: str) -> Iterator[str]:
    for part in split_top(_JOINERS.sub(",", text)):
        if part.count(r"\pm") == 1:
            yield clean(re.sub(r"^\+", "", part.replace(r"\pm", "+").strip()))
            yield clean(part.replace(r"\pm", "-"))
        elif part:
            yield clean(part)


def _enumerable(text: str) -> bool:
    """A plain list of values, so that a different count settles it."""
    return not _RELATION.search(text)


def _one_to_one(left: Sequence[str], right: Sequence[str]) -> bool:
    rest = list(right)
    for value in left:
        match = next((index for index, other in enumerate(rest) if _equal(value, other)), None)
        if match is None:
            return False
        rest.pop(match)
    return True
