"""What a gate does under an assumed spread of log-ratios: a model for planning, never for calibration.

With independent normal log rho of spread sigma, the prefix mean at t is normal with spread sigma / sqrt(t).
rho has mean 1 under the behaviour policy, which puts the mean of log rho at -sigma^2/2: the gate's lower
side is then a limit on KL. `centred` drops that drift; it is the model of a constant width in spreads.
"""

import torch
from torch import Tensor


def acceptance_by_position(
    *,
    gate_low: float,
    gate_high: float,
    length: int,
    sigma: float,
    centred: bool = False,
    reference_length: int | None = None,
) -> Tensor:
    """[L] probability that the gate of Eq. 8-9 keeps position t = 1..L of a response, float64."""
    position = torch.arange(1, length + 1, dtype=torch.float64)
    scale = ((reference_length or length) / position).sqrt()
    spread = sigma / position.sqrt()
    mean = 0.0 if centred else -(sigma**2) / 2
    high = torch.log1p(gate_high * scale)
    low = torch.log1p((-gate_low * scale).clamp(min=-1.0))  # a bound below 0 rejects no weight: log 0 = -inf
    kept: Tensor = torch.special.ndtr((high - mean) / spread) - torch.special.ndtr((low - mean) / spread)
    return kept


def gate_width_in_sigmas(
    *,
    gate_low: float,
    gate_high: float,
    length: int,
    sigma: float = 0.05,
    reference_length: int | None = None,
) -> str:
    """The gate's half-widths in spreads of the prefix mean, and what it keeps: a line for the start-up log.

    Args:
        length: longest response, L.
        sigma: assumed spread of a token's log-ratio, nats.
        reference_length: `gate_reference_length`, if set.
    """
    at_end = sigma / length**0.5
    scale = (reference_length or length) ** 0.5 / length**0.5
    kept = acceptance_by_position(
        gate_low=gate_low, gate_high=gate_high, length=length, sigma=sigma, reference_length=reference_length
    )
    return (
        f"gate: -{gate_low:g} / +{gate_high:g} is {gate_low * scale / at_end:.2f} / "
        f"{gate_high * scale / at_end:.2f} spreads of the prefix mean at {length} tokens if log-ratios have "
        f"sigma = {sigma:g}; their mean of -sigma^2/2 is {sigma**2 / 2 / at_end:.2f} spreads, so such drift "
        f"would keep {100 * kept.mean().item():.1f} % of tokens and {100 * kept[-1].item():.1f} % at the end"
    )
