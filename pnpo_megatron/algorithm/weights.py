"""The ladder of importance weights. A weight maps RatioStats to a log-weight, elementwise.

Position, length and sums arrive ready-made, so a weight cannot tell whether a response was packed, padded
or split over ranks. It returns logarithms; only the loss exponentiates, after any normalising.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from torch import Tensor

from pnpo_megatron.algorithm.ratios import RatioStats
from pnpo_megatron.errors import ConfigError

Weight = Callable[[RatioStats], Tensor]


def token_ratio(stats: RatioStats) -> Tensor:
    """Gives log rho_t: the current token only (GRPO, DAPO)."""
    return stats.token


def cumulative_ratio(stats: RatioStats) -> Tensor:
    """Gives log C_t: the exact prefix correction, Eq. 3; a reference, its scale is unbounded."""
    return stats.prefix_sum


def prefix_ratio(stats: RatioStats) -> Tensor:
    """Gives log C_t^(1/t): the geometric mean over the causal prefix, Eq. 7 (PNPO)."""
    return stats.prefix_sum / stats.position


def sequence_ratio(stats: RatioStats) -> Tensor:
    """Gives log C_L^(1/L): one value for the whole response (GSPO)."""
    return stats.response_sum / stats.length


def minpro_ratio(stats: RatioStats) -> Tensor:
    """Gives log rho_t + min over k < t of log rho_k (MinPRO, arXiv 2601.22718); log rho_1 at t = 1."""
    return stats.token + stats.preceding_min


def tempered_prefix(stats: RatioStats, *, alpha: float) -> Tensor:
    """Gives log C_t^(t^-alpha): alpha = 0 is the exact cumulative ratio, alpha = 1 is PNPO."""
    return stats.prefix_sum / stats.position**alpha


WEIGHTS: dict[str, Weight] = {
    "token": token_ratio,
    "cumulative": cumulative_ratio,
    "prefix": prefix_ratio,
    "sequence": sequence_ratio,
    "minpro": minpro_ratio,
}
TEMPERED = "tempered"
"""The one weight with a parameter: `tempered_prefix`, with its alpha."""


def resolve_weight(weight: str | Weight, alpha: float | None = None) -> Weight:
    """A weight from its name, from an import path ``"module:function"``, or itself.

    Args:
        alpha: of "tempered", in [0, 1]; no other weight has one.

    Raises:
        ConfigError: no such name, module or function, or the path names something that cannot be called; an
            alpha that is missing, out of range or not read.
    """
    tempered = weight == TEMPERED
    if tempered != (alpha is not None) or not 0.0 <= (alpha or 0.0) <= 1.0:
        raise ConfigError(
            f'objective.alpha = {alpha}: weight = "{TEMPERED}", and no other, needs one in [0, 1]; 0 is the '
            f"cumulative ratio, 1 is PNPO's prefix mean. Here weight = {weight!r}"
        )
    if alpha is not None:
        return partial(tempered_prefix, alpha=alpha)
    if not isinstance(weight, str):
        return weight
    if weight in WEIGHTS:
        return WEIGHTS[weight]
    module_name, colon, function_name = weight.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(
            f"objective.weight = {weight!r}: expected one of {', '.join([*WEIGHTS, TEMPERED])}, "
            'or your own as "module:function"'
        )
    try:
        function = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"objective.weight = {weight!r} cannot be imported ({error}); check the spelling and that the "
            "folder of the module is on PYTHONPATH"
        ) from error
    if not callable(function):
        raise ConfigError(f"objective.weight = {weight!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]
