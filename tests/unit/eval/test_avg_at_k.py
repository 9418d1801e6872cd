import math
import random

import pytest

from pnpo_megatron.eval.avg_at_k import Score, avg_at_k, macro_mean, paired_difference, pass_at_k


def test_h36_the_mean_is_over_problems_of_the_mean_over_their_samples():
    assert avg_at_k([[1, 1, 1, 1], [0, 0, 0, 0]], 4).mean == 0.5


def test_h36_missing_samples_are_an_error_and_not_a_smaller_divisor():
    """A flat mean would give 0.667, a division by the k asked for would halve the score."""
    with pytest.raises(ValueError, match="problem 1 has 2 graded samples, not the 4 asked for"):
        avg_at_k([[1, 1, 1, 1], [0, 0]], 4)
    with pytest.raises(ValueError, match="problem 0 has 8 graded samples, not the 16"):
        avg_at_k([[1] * 8, [0] * 8], 16)
    with pytest.raises(ValueError, match="no problem"):
        avg_at_k([], 4)
    with pytest.raises(ValueError, match=r"outside 0\.\.1"):
        avg_at_k([[1, 2]], 2)


def test_standard_errors_by_hand():
    """Means 1, 0.5, 0: spread 0.5; p(1-p)/(k-1) = 0, 1/12, 0."""
    score = avg_at_k([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], 4)
    assert score.stderr == pytest.approx(0.5 / math.sqrt(3))
    assert score.stderr_sampling == pytest.approx(math.sqrt(0.25 / 3) / 3)
    assert math.isnan(avg_at_k([[1, 0]], 2).stderr)
    assert math.isnan(avg_at_k([[1], [0]], 1).stderr_sampling)


def test_both_standard_errors_are_the_spread_of_repeated_experiments():
    """400 repeats: new problems spread the score by `stderr`, the same ones by `stderr_sampling`."""
    rng = random.Random(5)

    def run(chances):
        return avg_at_k([[int(rng.random() < p) for _ in range(8)] for p in chances], 8)

    def draw():
        return [rng.betavariate(0.5, 0.5) for _ in range(30)]

    def spread(scores):
        means = [score.mean for score in scores]
        centre = sum(means) / len(means)
        return math.sqrt(sum((mean - centre) ** 2 for mean in means) / (len(means) - 1))

    new, fixed = [run(draw()) for _ in range(400)], draw()
    same = [run(fixed) for _ in range(400)]
    assert spread(new) == pytest.approx(sum(score.stderr for score in new) / 400, rel=0.15)
    assert spread(same) == pytest.approx(sum(score.stderr_sampling for score in same) / 400, rel=0.15)
    assert spread(same) < 0.6 * spread(new)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    # 2 right of 4: of the 6 pairs one has none.
    assert pass_at_k([[1, 1, 0, 0]], 2) == pytest.approx(5 / 6)
    assert pass_at_k([[1, 1, 0, 0], [0, 0, 0, 0]], 1) == pytest.approx(0.25)
    assert pass_at_k([[1, 0, 0, 0], [0, 0, 0, 0]], 4) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples a problem; there are 4"):
        pass_at_k([[1, 1, 0, 0]], 5)


def test_the_macro_mean_weighs_benchmarks_and_not_problems():
    amc = avg_at_k([[1, 0]] * 20 + [[1, 1]] * 20, 2)
    aime = avg_at_k([[0, 0]] * 30, 2)
    macro = macro_mean([amc, aime])
    assert macro.mean == pytest.approx((0.75 + 0.0) / 2)
    assert macro.stderr == pytest.approx(math.sqrt(amc.stderr**2 + aime.stderr**2) / 2)
    assert macro_mean([Score(0.3, 0.03, 0.01), Score(0.5, 0.04, 0.0)]).stderr == pytest.approx(0.025)
    with pytest.raises(ValueError, match="no benchmark"):
        macro_mean([])


def test_a_paired_difference_takes_the_spread_of_the_differences():
    before, after = [0.0, 0.5, 0.25, 0.75], [0.25, 0.75, 0.75, 1.0]
    difference = paired_difference(before, after)
    assert difference.mean == pytest.approx(0.3125)
    assert difference.stderr == pytest.approx(0.125 / 2)
    assert difference.low95 == pytest.approx(0.3125 - 1.959964 * 0.0625)
    assert difference.high95 == pytest.approx(0.3125 + 1.959964 * 0.0625)
    with pytest.raises(ValueError, match="2 problems before and 1 after"):
        paired_difference([0.0, 1.0], [1.0])
