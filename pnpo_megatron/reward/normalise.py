"""Spellings of one answer brought to one form: text to text, and text to exact numbers. No mathematics
beyond that."""

import re
from fractions import Fraction

MAX_DIGITS = 4000
"""Longer digit strings are compared as text: Python refuses to convert them, and no answer needs it."""
MAX_UNWRAPS = 100
"""Redundant brackets that are taken off."""

_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full-width forms
_SIGNS = {"−": "-", "–": "-", "\u00a0": " ", "\u3000": " ", "°": r"^\circ", "π": r"\pi", "∞": r"\infty"}
_SIGNS |= {"≤": r"\le ", "≥": r"\ge ", "×": r"\times ", "·": r"\cdot ", "。": ".", "、": ",", "∪": r"\cup "}
_TABLE = str.maketrans({**{chr(a): chr(b) for a, b in _WIDTH.items()}, **_SIGNS})

_REWRITES = [
    (re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])"), ""),
    (re.compile(r"(?<!\\)\\[()\[\]](?!\s*\d+\s*(?:ex|pt|em)\])|\*\*|`"), " "),
    (re.compile(r"\\\$|\$|€|£|\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])\.?"), ""),
    (re.compile(r",\s*\\!\s*|\{,\}\s*(?:\\!)?"), ","),
    (re.compile(r"(?<!\\)\\[!,]"), ""),
    (re.compile(r"(?<!\\)\\[;: ]|~|\\q?quad(?![A-Za-z])|\\hspace\{[^{}]*\}"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\(?:mbox|mathrm|textrm|textbf|textit|mathbf|emph|bf|rm)\s*\{"), r"\\text{"),
    (re.compile(r"(?<![\d.])(\d+)\.0+(?![\d.])"), r"\1"),
    (re.compile(r"\s+"), " "),
]
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_UNIT_TEXT = re.compile(
    r"^(?P<value>.*[\d})].*?)\s*\\text\s*\{(?P<unit>[^{}]*)\}\s*(?:\^\s*\{?\s*\d\s*\}?)?$"
)
_UNIT_WORDS = re.compile(r"^(?P<value>[\d.,/ ]*\d)\s+(?P<unit>[A-Za-z][A-Za-z./ ]*[A-Za-z.])(?:\^\{?\d\}?)?$")
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*[CF]?$|\s*\\degrees?$")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*per\s?cent\s*\}|(?<=[\d} ])per\s?cent)$", re.IGNORECASE)
_NO_UNIT = frozenset(
    re.findall(
        r"\S+",
        "and or to if for where when else not no than over times plus minus mod modulo hundred thousand "
        "million billion trillion dozen pi half halves third thirds quarter quarters fourth fourths fifth "
        "fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths "
        "thousandth thousandths squared cubed factorial choose base is are infinity between from percent a.m "
        "p.m am pm",
    )
)
_DECIMAL = re.compile(r"([+-]*)\s*(\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d*)(?:\.(\d*))?")
_ARG = r"(?:\{\s*([+-]?\s*[\d.,]+)\s*\}|(\d))"
_FRACTION = re.compile(r"([+-]?)\s*(\d+(?=\s*\\| )|)\s*\\frac\s*" + _ARG + r"\s*" + _ARG)
_SLASH = re.compile(r"([+-]?)\s*(?:(\d+) )?\s*([\d.,]+)\s*/\s*([+-]?[\d.,]+)")


def clean(text: str) -> str:
    """One spelling: ASCII digits and signs, no dollar signs, spacing macros or redundant brackets."""
    text = text.translate(_TABLE)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip(" _*").rstrip(".;:, ")
    for _ in range(MAX_UNWRAPS):
        inner = _unwrapped(text)
        if inner is None:
            break
        text = inner
    return text


def _unwrapped(text: str) -> str | None:
    r"""The inside of one outer ``{...}``, ``\text{...}`` or comma-free ``(...)``, or None."""
    prefix = re.match(r"\\text\s*(?=\{)", text)
    body = text[prefix.end() :] if prefix else text
    if len(body) < 2 or body[0] + body[-1] not in ("{}", "()") or closing(body, 0) != len(body) - 1:
        return None
    inner = body[1:-1].strip()
    if body[0] == "(" and len(split_top(inner)) > 1:
        return None  # a tuple or an open interval
    return inner


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, mixed kinds allowed (``[0,1)``); -1 where
    there is none."""
    depth, escaped = 0, False
    for index in range(start, len(text)):
        char = text[index]
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "{([":
            depth += 1
        elif char in "})]":
            depth -= 1
            if depth == 0:
                return index
    return -1


def split_top(text: str) -> list[str]:
    r"""Split at the commas outside all brackets, ``\{ \}`` included."""
    parts, depth, begin = [], 0, 0
    for index, char in enumerate(text):
        if char in "{([":
            depth += 1
        elif char in "})]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[begin:index].strip())
            begin = index + 1
    return [*parts, text[begin:].strip()]


def without_unit(text: str) -> str:
    """A value without its trailing unit or degree sign. Words that change the value (``million``) stay."""
    text = _DEGREES.sub("", text)
    for pattern in (_UNIT_TEXT, _UNIT_WORDS):
        match = pattern.match(text)
        if match and not _changes_value(match.group("unit")):
            return _DEGREES.sub("", match.group("value")).strip()
    return text


def _changes_value(unit: str) -> bool:
    words = re.findall(r"[a-z.]+", unit.lower())
    return bool(re.search(r"\d", unit)) or any(word.strip(".") in _NO_UNIT for word in words)


def split_percent(text: str) -> tuple[str, bool]:
    """A value and whether a percent sign or word followed it."""
    bare = _PERCENT.sub("", text)
    return (bare.strip(), True) if bare != text else (text, False)


def plain(text: str) -> str:
    """Text macros opened and all spaces gone: equal for two spellings of one word or formula."""
    return re.sub(r"\s+", "", _TEXT.sub(r"\1", text))


def decimal_form(text: str) -> str | None:
    """Canonical text of an integer or decimal of any length (``025`` is ``25``, ``-1,000.50`` is
    ``-1000.5``)."""
    match = _DECIMAL.fullmatch(text.strip())
    if match is None or not (match.group(2) or match.group(3)):
        return None
    sign, whole, part = match.group(1), re.sub("[, ]", "", match.group(2)), match.group(3) or ""
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    value = f"{whole}.{part}" if part else whole
    return f"-{value}" if sign.count("-") % 2 and value != "0" else value


def rational(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction or mixed number; None for anything else or
    over-long digits."""
    if len(text) > MAX_DIGITS:
        return None
    decimal = decimal_form(text)
    if decimal is not None:
        return Fraction(decimal)
    match = _FRACTION.fullmatch(text.strip())
    if match:
        sign, whole, *parts = match.groups()
        numerator, denominator = parts[0] or parts[1], parts[2] or parts[3]
    else:
        match = _SLASH.fullmatch(text.strip())
        if match is None:
            return None
        sign, whole, numerator, denominator = match.groups()
    return _mixed(sign, whole or "0", numerator, denominator)


def _mixed(sign: str, whole: str, numerator: str, denominator: str) -> Fraction | None:
    top, bottom = decimal_form(numerator), decimal_form(denominator)
    if top is None or bottom in (None, "0"):
        return None
    value = Fraction(whole) + Fraction(top) / Fraction(bottom)
    return -value if sign == "-" else value
