"""When two answers are equal: exact value, whatever the spelling."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pnpo_megatron.reward.compare import equal

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "eval"

EQUAL = [
    ("\u0663\u0664", "34"),
    (r"x=5", r"5"),
    (r"5", r"x=5"),
    (r"28%", r"28"),
    (r"28", r"28%"),
    (r"0.28", r"28\%"),
    (r"2516", r"2516_8"),
    (r"1 000", r"1000"),
    (r"3/4", r"\frac34"),
    (r"137.5", r"137 \frac{1}{2}"),
    (r"y=2x+3", r"y = 2x + 3"),
    (r"2x+3", r"y = 2x + 3"),
    (r"y=3+2x", r"y = 2x + 3"),
    (r"(-\infty, 2) \cup (3, \infty)", r"x<2 \text{ or } x>3"),
    (r"x > 2", r"(2,\infty)"),
    (r"x \in [-2,7]", r"-2 \le x \le 7"),
    (r"-2 \le x \le 7", r"x \in [-2,7]"),
    (r"[-2,7]", r"x \in [-2,7]"),
    (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"1-\sqrt5,1+\sqrt5,-2", r"\{1\pm\sqrt{5},-2\}"),
    (r"12\text{ cm}^2", r"12"),
    (r"12 cm", r"12"),
    (r"336^\circ", r"336"),
    (r"336°", r"336"),
    (r"\frac{1}{2}\sqrt{2}", r"\frac{\sqrt2}{2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"),
    (r"1,2", r"2,1"),
    (r"\{1,2\}", r"1,2"),
    (r"2^{10}", r"1024"),
    (r"1024", r"2^{10}"),
    (r"x^2+2x+1", r"(x+1)^2"),
    (r"\text{(C)}", r"C"),
    (r"C", r"\text{(C)}"),
    (r"3+4", r"7"),
    (r"3 \times 10^5", r"300000"),
    (r"\begin{pmatrix} 0.2 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}"),
    (r"east", r"\text{east}"),
    (r"5.4", r"5.4 \text{ cents}"),
    (r"36", r"\$36"),
    (r"\frac{270}{7}", r"\frac{270}7\text{ degrees}"),
    (r"2,3,5", r"5,3,2"),
    (r"-q+p", r"p - q"),
    (r"10,080", r"10,\!080"),
    (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
    (r"\sin 30^\circ", r"\frac12"),
    (r"3i+1", r"1+3i"),
    (r"6+9*i", r"6+9i"),
    (r"3*5", r"15"),
    (r"1.5", r"1\frac12"),
    (r"016", r"16"),
    (r"000", r"0"),
    (r"\$18.9", r"\$18.90"),
    (r"18.90 dollars", r"\$18.90"),
    (r"-0", r"0"),
    (r"\frac{0}{5}", r"0"),
    (r"10 \%", r"10"),
    (r"1{,}006", r"1006"),
    (r"1.000", r"1"),
    (r"12.", r"12"),
    (r"\mathrm{east}", r"\text{east}"),
    (r"\text{Even}", r"\text{even}"),
    (r"\cot(x)", r"\cot x"),
    (r"\ln e^2", r"2"),
    (r"2 \text{ or } 3", r"2,3"),
    (r"m\ge\sqrt2", r"[\sqrt{2},\infty)"),
    (r"\infty", r"\infty"),
    (r"3\,000", r"3000"),
    (r"90", r"90^\circ"),
    (r"5^{-2}", r"\frac{1}{25}"),
    (r"4!", r"24"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{-1}{-2}", r"\frac12"),
    (r"x+1=0", r"x=-1"),
    (r"\left(\frac35,\frac83\right]", r"\left(\frac{3}{5},\frac{8}{3}\right]"),
    (r"\frac{3}{5}<x\le\frac83", r"\left(\frac{3}{5},\frac{8}{3}\right]"),
]

DIFFERENT = [
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),  # both vanish in floating point
    (r"\frac{1}{2^{398}}", r"\frac{1}{2^{399}}"),
    (r"\sqrt{2} + \frac{1}{2^{398}}", r"\sqrt{2}"),
    (r"(8,-2)", r"(9,-5)"),
    (r"0.666667", r"\frac{2}{3}"),
    (r"3.14159265", r"\pi"),
    (r"0.1234567890123456789", r"0.12345678901234567891"),
    (r"34 or 35", r"34"),
    (r"2800\%", r"28\%"),
    (r"2516_9", r"2516_8"),
    (r"5 million", r"5"),
    (r"x \ge 2", r"(2,\infty)"),
    (r"(1,2)", r"(2,1)"),
    (r"30", r"30,30"),
    (r"(x+1)^{50}", r"(x+1)^{51}"),
    (r"D", r"\text{(C)}"),
    (r"-\frac{35}{9}", r"-3.8888889"),
    (r"\begin{pmatrix} 0.3 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}"),
    (r"\text{West}", r"\text{east}"),
    (r"38.57", r"\frac{270}7\text{ degrees}"),
    (r"(2,3)\cup(3,4)", r"(2,4)"),
    (r"p-q", r"q-p"),
    (r"x \ne 3", r"3"),
    (r"30, 40", r"30"),
    (r"0.5", r"5"),
    (r"330", r"33"),
    (r"1e3", r"1000"),
    (r"two", r"2"),
    (r"-\infty", r"\infty"),
    (r"25\text{ or }26", r"25"),
    (r"\frac{\pi}{2}", r"90^\circ"),
]


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_spelling_does_not_matter(answer: str, gold: str) -> None:
    assert equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_value_does(answer: str, gold: str) -> None:
    assert not equal(answer, gold)


def test_h01_leading_zeros_do_not_matter_in_either_direction_and_neighbours_differ() -> None:
    for number in range(1000):
        padded = f"{number:03d}"
        assert equal(padded, str(number)) and equal(str(number), padded)
        assert not equal(padded, str(number + 1)) and not equal(str(number + 1), padded)


@pytest.mark.parametrize("digits", [20, 400, 5000, 19_000])
def test_integers_of_any_size_are_compared_to_the_last_digit(digits: int) -> None:
    number = "9" * (digits - 1)
    assert equal(f"00{number}3", f"{number}3")
    assert not equal(f"{number}4", f"{number}3") and not equal(f"-{number}3", f"{number}3")


def test_rounded_decimals_never_equal_an_exact_value_however_long() -> None:
    third = "0." + "3" * 40
    assert not equal(third, r"\frac{1}{3}")
    assert not equal("1.41421356237309504880168872420969807856967187537694", r"\sqrt{2}")
    assert not equal(r"\{0.333333, 2\}", r"\{\frac{1}{3}, 2\}")
    assert not equal(r"[0.333333, \pi)", r"[\frac{1}{3}, \pi)")


def test_every_gold_of_math500_equals_itself_respelled_and_no_other() -> None:
    path = SHARED / "math500.jsonl"
    if not path.is_file():
        pytest.skip("shared evaluation data is not beside the project")
    golds = {json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()}
    formulas = sorted(gold for gold in golds if not gold.lstrip("-").isdigit())
    draw = random.Random(0)
    for gold in formulas:
        respelled = gold.replace(r"\frac", r"\dfrac").replace("(", r"\left(").replace(")", r"\right)")
        assert equal(f"$ {respelled} $.", gold), gold
    wrong = [(a, b) for a in formulas for b in draw.sample(formulas, 1) if a != b and equal(a, b)]
    assert not wrong
