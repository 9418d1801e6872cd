"""Avg@k and pass@k with standard errors, macro means and paired differences. Plain Python, no model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

_TWO_SIDED_95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Score:
    """A mean over problems and how sure one can be of it."""

    mean: float
    stderr: float
    """For new problems of the same kind: spread of per-problem means; already contains sampling noise.
    NaN for a single problem."""
    stderr_sampling: float
    """For the same problems, sampled again. NaN for k = 1."""


@dataclass(frozen=True)
class Difference:
    """Mean of paired per-problem differences, after minus before."""

    mean: float
    stderr: float
    low95: float
    high95: float


def avg_at_k(correct: Sequence[Sequence[bool | float]], k: int) -> Score:
    """Mean over problems of the mean over their k samples (DECISIONS: Scores).

    Args:
        correct: per problem its k graded samples, 0 or 1.
        k: samples asked for. A problem with another number of samples is an error, never averaged over
            k nor over what is there (TRAPS H36).
    """
    means = problem_means(correct, k)
    n = len(means)
    variance = sum(p * (1.0 - p) for p in means) / (k - 1) if k > 1 else math.nan
    return Score(mean=fmean(means), stderr=_stderr(means), stderr_sampling=math.sqrt(variance) / n)


def pass_at_k(correct: Sequence[Sequence[bool | float]], k: int) -> float:
    """Probability that at least one of k samples is right: 1 - C(n-c, k) / C(n, k), mean over problems.

    Unbiased for problems with n >= k samples of which c are right; every problem needs the same n.
    """
    n = len(correct[0]) if correct else 0
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples a problem; there are {n}")
    wrong = [n - round(mean * n) for mean in problem_means(correct, n)]
    return fmean(1.0 - math.comb(misses, k) / math.comb(n, k) for misses in wrong)


def macro_mean(scores: Sequence[Score]) -> Score:
    """Plain mean over benchmarks: thirty problems weigh as much as forty. Errors add as independent ones."""
    if not scores:
        raise ValueError("no benchmark was scored; name at least one")
    count = len(scores)
    return Score(
        mean=fmean(score.mean for score in scores),
        stderr=math.hypot(*(score.stderr for score in scores)) / count,
        stderr_sampling=math.hypot(*(score.stderr_sampling for score in scores)) / count,
    )


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """Difference of two models on the same problems, from per-problem means in the same order.

    The interval is normal (mean +- 1.96 standard errors); with one problem it is NaN.
    """
    if len(before) != len(after) or not before:
        raise ValueError(
            f"{len(before)} problems before and {len(after)} after: a paired difference needs the same ones"
        )
    differences = [late - early for early, late in zip(before, after, strict=True)]
    return _difference(fmean(differences), _stderr(differences))


def macro_difference(differences: Sequence[Difference]) -> Difference:
    """Plain mean over benchmarks, whose errors add as independent ones."""
    count = len(differences)
    stderr = math.hypot(*(one.stderr for one in differences)) / count
    return _difference(fmean(one.mean for one in differences), stderr)


def _difference(mean: float, stderr: float) -> Difference:
    return Difference(mean, stderr, mean - _TWO_SIDED_95 * stderr, mean + _TWO_SIDED_95 * stderr)


def problem_means(correct: Sequence[Sequence[bool | float]], k: int) -> list[float]:
    """Mean of each problem's samples, all of which must be k and lie in [0, 1]."""
    if not correct:
        raise ValueError("no problem was graded; the benchmark file is empty")
    for index, samples in enumerate(correct):
        if len(samples) != k:
            raise ValueError(
                f"problem {index} has {len(samples)} graded samples, not the {k} asked for; "
                "sample the missing ones, or ask for fewer"
            )
        if not all(0.0 <= sample <= 1.0 for sample in samples):
            raise ValueError(f"problem {index} has a grade outside 0..1: {list(samples)}")
    return [fmean(samples) for samples in correct]


def percent(value: float | None, sign: str = "") -> str:
    """In per cent, with one digit; a dash where there is no number."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:{sign}.1f}"


def _stderr(values: Sequence[float]) -> float:
    """Sample standard deviation over sqrt(n); unknown, so NaN, for one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
