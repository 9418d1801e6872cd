"""The only file that calls math-verify: formulas that plain numbers and lists do not cover, compared exactly.

math-verify reads LaTeX and decides; it rounds, though (1/2^98 equals 1/2^99 for it), so a "yes" about numbers
must also hold to 60 significant digits here. Text that would cost unbounded time is refused before parsing.
"""

import logging
import math
import re
from typing import Any

MAX_LENGTH = 1000
MAX_DEPTH = 24
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 3_000
MAX_TERMS = 1_000
_DIGITS = 60
_INTEGER = re.compile(r"\d+")
_POWER = re.compile(r"\^\s*(\{|-?\d+|.)")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
_UPPER_LIMIT = re.compile(r"\\(?:sum|prod)\s*(?:_\s*(?:\{[^{}]*\}|\S))?\s*\^\s*(\{[^{}]*\}|\\?\w+)")
_ONE_TOWER = re.compile(r"\{?(\d{1,5})\s*\^\s*\{?(\d{1,2})\}?\}?")


def symbolic_equal(answer: str, gold: str) -> bool:
    """Whether two cleaned LaTeX formulas are equal in exact value. What cannot be read is not."""
    if too_costly(answer) or too_costly(gold):
        return False
    load_math_verify()
    left, right = _parse(gold), _parse(answer)
    if left is None or right is None:
        return False
    from math_verify import verify

    left, right = _exact_decimals(left), _exact_decimals(right)
    same = verify(left, right, numeric_precision=_DIGITS, allow_set_relation_comp=True, timeout_seconds=None)
    return bool(same) and _exactly_equal(left, right)


def load_math_verify() -> None:
    """Import it now (a second of work), so that no time limit can cut an import short."""
    import math_verify  # noqa: F401

    # It warns that its own time limit is off: ours is on.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def _parse(text: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    text = re.sub(r"(?<=\d)i(?![A-Za-z])", " i", text)  # 3i: it looks for a free-standing i
    text = _DEGREES.sub(r"(\1 \\cdot \\frac{\\pi}{180})", text)  # it drops the sign and takes radians
    found = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None, fallback_mode="no_fallback")
    return found[0] if found else None


def _exact_decimals(expression: Any) -> Any:
    """Decimals as the fractions they spell; a rounded decimal must not equal an exact value."""
    from sympy import Float, Rational

    floats = expression.atoms(Float) if hasattr(expression, "atoms") else set()
    return expression.xreplace({number: Rational(str(number)) for number in floats}) if floats else expression


def _exactly_equal(left: Any, right: Any) -> bool:
    """False where two numbers, or numbers inside equal containers, differ in their first 60 digits."""
    from sympy import Expr, FiniteSet, Interval, MatrixBase, Tuple

    if isinstance(left, FiniteSet) and isinstance(right, FiniteSet):
        return all(any(_exactly_equal(a, b) for b in right.args) for a in left.args)
    if isinstance(left, (Tuple, Interval)) and type(left) is type(right):
        return all(_exactly_equal(a, b) for a, b in zip(left.args, right.args, strict=True))
    if isinstance(left, MatrixBase) and isinstance(right, MatrixBase):
        return all(_exactly_equal(a, b) for a, b in zip(left.flat(), right.flat(), strict=True))
    if isinstance(left, Expr) and isinstance(right, Expr):
        return _same_number(left, right)
    return True  # relations, sets of other kinds, words: math-verify's verdict stands


def _same_number(left: Any, right: Any) -> bool:
    from sympy import simplify
    from sympy.core.expr import UnevaluatedExpr

    left, right = (
        value.replace(lambda part: isinstance(part, UnevaluatedExpr), lambda part: part.args[0])
        for value in (left, right)
    )
    if left == right:
        return True
    if not (left.is_number and right.is_number):
        difference = simplify(left - right)
        return not difference.is_number or difference == 0
    exact = (left - right).doit()
    if exact.is_Rational:
        return bool(exact == 0)
    first, second = left.evalf(_DIGITS + 20), right.evalf(_DIGITS + 20)
    size = max(abs(first), abs(second))
    if not size.is_comparable or not size.is_finite:
        return False
    return bool(abs(first - second) <= size * 10**-_DIGITS) or simplify(left - right) == 0


def too_costly(text: str) -> bool:
    """Whether a formula could take unbounded time: length, nesting, powers, factorials and sums."""
    if (
        not text
        or len(text) > MAX_LENGTH
        or "__" in text
        or "$" in text
        or re.search(r"[\x00-\x08\x0b-\x1f]", text)
    ):
        return True
    return _too_deep(text) or _huge_power(text) or _huge_factorial(text) or _huge_operator(text)


def _too_deep(text: str) -> bool:
    depth = deepest = 0
    for char in text:
        depth += (char in "{([") - (char in "})]")
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH


def _huge_power(text: str) -> bool:
    grouped = 1  # (...)^a )^b: exponents multiply
    for match in _POWER.finditer(text):
        exponent = _braced(text, match.start(1)) if match.group(1) == "{" else match.group(1)
        size = _exponent_size(exponent)
        if size > MAX_EXPONENT:
            return True
        if text[: match.start()].rstrip().endswith((")", "}", "]")):
            grouped *= max(size, 1)
    return grouped > MAX_EXPONENT


def _exponent_size(exponent: str) -> int:
    """An upper bound of the integers in an exponent, MAX_EXPONENT + 1 where none is cheap to give."""
    tower = _ONE_TOWER.fullmatch(exponent.strip())
    if tower:
        base, power = int(tower.group(1)), int(tower.group(2))
        return int(base**power)
    numbers = _integers(exponent)
    if "!" in exponent or ("^" in exponent and max(numbers, default=0) > 5):
        return MAX_EXPONENT + 1
    size = 1
    for number in numbers:
        size = min(size * max(number, 1), MAX_EXPONENT + 1)
    return size


def _braced(text: str, start: int) -> str:
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start + 1 : index]
    return text[start + 1 :]


def _huge_factorial(text: str) -> bool:
    if "!" not in text and not re.search(r"\\(?:binom|Gamma)", text):
        return False
    largest = max(_integers(text), default=0)
    if (
        largest > MAX_FACTORIAL
        or re.search(r"!\s*!\s*!", text)
        or (largest > 5 and re.search(r"!\s*!", text))
    ):
        return True
    return any(_huge_argument(text[: match.start()]) for match in re.finditer(r"[)}\]]\s*!", text))


def _huge_argument(before: str) -> bool:
    """Whether the bracket that `before` ends in, about to be taken to its factorial, may be large."""
    depth, start = 1, len(before)
    while start > 0 and depth > 0:
        start -= 1
        depth += (before[start] in ")}]") - (before[start] in "({[")
    numbers = _integers(before[start:])
    nested = bool(re.search(r"[!^]", before[start:])) and max(numbers, default=0) > 3
    return nested or math.prod(max(number, 1) for number in numbers) > MAX_FACTORIAL


def _integers(text: str) -> list[int]:
    """The integers of a text; those of more than six digits as some number above every limit."""
    return [int((number.lstrip("0") or "0")[:7]) for number in _INTEGER.findall(text)]


def _huge_operator(text: str) -> bool:
    if not re.search(r"\\(?:sum|prod|int|lim|bigcup|bigcap)(?![A-Za-z])", text):
        return False
    if any(re.search("[A-Za-z]", top.replace(r"\infty", "")) for top in _UPPER_LIMIT.findall(text)):
        return True  # sums to n: no cheap proof either way, only equal spelling counts
    return max(_integers(text), default=0) > MAX_TERMS or bool(
        re.search(r"\^\s*\{[^{}]*\^", text) or re.search(r"\d\s*\^\s*\{?\s*\d", text)
    )
