"""What the micro-batches of all ranks gave, put together: the same on every rank. Collective."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pnpo_megatron.algorithm.diagnostics import Tally, add_tallies
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.parallel.quantiles import quantiles
from pnpo_megatron.parallel.reduce import max_over, sum_over
from pnpo_megatron.policy.forward import MicroBatch, Work

QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)


def whole_sequences(
    work: Work, parts: Sequence[tuple[MicroBatch, Tensor]], groups: ParallelGroups, device: torch.device
) -> list[Tensor]:
    """[n] values of trained tokens per micro-batch -> float32 per sequence, on the host, 0 off the mask."""
    flat = torch.zeros(len(work.flat.ids), dtype=torch.float32, device=device)
    for micro_batch, values in parts:
        flat[micro_batch.places] = values.to(flat.dtype)
    # Every token has one owner and zeros elsewhere, so the sum adds nothing to it.
    flat = sum_over(sum_over(flat, groups.dp_cp), groups.pp)
    lengths = work.flat.starts.diff().tolist()
    return [part.clone() for part in torch.split(flat.cpu(), lengths)]


def whole_tally(tallies: Sequence[Tally], groups: ParallelGroups, device: torch.device) -> Tally:
    """Micro-batches, then data and context ranks, then pipeline stages, of which only the last has any.

    Here, and for the quantiles of the weights, the host waits for the device.
    """
    total = add_tallies(tallies, device)
    sums, maxima = total.sums, total.maxima
    for group in (groups.dp_cp, groups.pp):
        sums, maxima = sum_over(sums, group), max_over(maxima, group)
    return Tally(sums.cpu(), maxima.cpu())


def weight_quantiles(
    log_weights: Sequence[Tensor], groups: ParallelGroups, device: torch.device
) -> dict[str, float]:
    """Of all trained tokens; exact, so the same for every split. Stages without any add 0."""
    empty = torch.empty(0, device=device)
    found = quantiles(torch.cat([empty, *log_weights]).float(), QUANTILES, groups.dp_cp)
    found = sum_over(found.exp() if log_weights else found, groups.pp)
    return dict(zip((f"weight/q{round(100 * q):02}" for q in QUANTILES), found.tolist(), strict=True))
