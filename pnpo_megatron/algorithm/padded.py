"""The loss for people who train with something else: padded tensors in, one scalar out."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pnpo_megatron.algorithm.objective import (
    Objective,
    attach_slope,
    loss_shares,
    renormalising_factor,
    surrogate_value,
    token_slope,
    token_terms,
)
from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.algorithm.ratios import check_same_shape, count_tokens, padded_ratio_stats
from pnpo_megatron.algorithm.select import all_true

CHUNK_TOKENS = 1 << 18
"""Tokens whose temporaries live at once. Rows are independent, so this moves memory and time, not numbers."""


def policy_loss_padded(
    objective: str | Objective,
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    **overrides: Any,
) -> Tensor:
    """The policy loss of one whole mini-batch of padded responses; a scalar to minimise.

    Args:
        objective: a preset name ("pnpo", "gspo", "grpo", "cumulative", "minpro") or an `Objective`.
        policy_logprobs, old_logprobs: [B, T], nats; only the first carries a gradient.
        advantages: [B], one a response (`group_relative(rewards).flatten()`).
        response_mask: [B, T] bool or 0/1, True on trained tokens, any pattern.
        overrides: single settings, as in ``gate_low=7e-4``; see `objective_settings`.

    Returns:
        The mean over the B' responses with at least one True, or over all True tokens, as the objective
        says. With no True at all: loss 0, gradient 0. For micro-batches of one mini-batch use `policy_loss`
        with shares of the whole (`loss_shares`): means of means differ (TRAPS H09). With `renormalise`, means
        are over accepted tokens, and over responses that have one.
    """
    check_same_shape(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs, response_mask=response_mask)
    if policy_logprobs.dim() != 2 or advantages.shape != policy_logprobs.shape[:1]:
        raise ValueError(
            f"policy_logprobs is {list(policy_logprobs.shape)} and advantages {list(advantages.shape)}; "
            "expected [B, T] and [B]"
        )
    if isinstance(objective, str):
        objective = make_objective(objective, **overrides)
    elif overrides:
        raise ValueError(f"{', '.join(overrides)} given beside a ready Objective: set it in make_objective")
    mask = response_mask.bool()
    slope, value = _slope_and_value(objective, policy_logprobs, old_logprobs, advantages, mask)
    return attach_slope(policy_logprobs, slope, value)


@torch.no_grad()
def _slope_and_value(
    objective: Objective,
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """The slope d loss / d log pi [B, T] and the loss, a few rows at a time."""
    dtype = torch.promote_types(torch.promote_types(policy_logprobs.dtype, old_logprobs.dtype), torch.float32)
    lengths = count_tokens(response_mask)
    shares = loss_shares(lengths, objective.mean).to(dtype)[:, None]
    advantages = advantages.to(dtype)[:, None]
    # Every slot is written where no row has padding; a fill would touch the whole memory once more.
    make_slope = torch.empty if all_true(response_mask) else torch.zeros
    slope = make_slope(policy_logprobs.shape, dtype=dtype, device=policy_logprobs.device)
    value = torch.zeros((), dtype=torch.float64, device=policy_logprobs.device)
    kept = []
    for rows in _blocks_of_rows(lengths, slope.shape[1]):
        columns = _used_columns(response_mask[rows])
        policy, old, mask = (x[:, columns][rows] for x in (policy_logprobs, old_logprobs, response_mask))
        stats = padded_ratio_stats(policy, old, mask)
        terms = token_terms(objective, stats, advantages[rows])
        in_place = slope[rows, columns] if isinstance(rows, slice) else None
        scale = advantages[rows] * shares[rows]
        terms, part = token_slope(objective, stats, terms, scale, mask, out=in_place)
        value += surrogate_value(part, policy, mask)
        if not isinstance(rows, slice):
            slope[:, columns].index_copy_(0, rows, part)
        if terms.accepted is not None:
            kept.append(terms.accepted)
    if kept:
        accepted = torch.cat(kept)
        factor = renormalising_factor(
            objective.mean,
            tokens=float(lengths.sum()),
            kept=float(accepted.sum()),
            responses=float((lengths > 0).sum()),
            kept_responses=float((accepted > 0).sum()),
        )
        slope, value = slope.mul_(factor), value * factor
    return slope, value.to(dtype)


def _blocks_of_rows(lengths: Tensor, columns: int) -> Iterator[Tensor | slice]:
    """Rows whose temporaries live at once: neighbours where all are equally long, else sorted by length."""
    size = max(1, CHUNK_TOKENS // max(1, columns))
    if lengths.device.type == "cpu" and len(lengths) and bool((lengths == lengths[0]).all()):
        yield from (slice(start, start + size) for start in range(0, len(lengths), size))
    else:
        yield from lengths.argsort().split(size)


def _used_columns(response_mask: Tensor) -> slice:
    """The columns from the first to the last True; all of them where asking would mean waiting for a device.

    Rows come sorted by length: those of one chunk are about equally long, and little padding is computed.
    """
    if response_mask.device.type != "cpu" or all_true(response_mask):
        return slice(None)
    used = response_mask.view(torch.uint8).amax(0).nonzero()
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)
