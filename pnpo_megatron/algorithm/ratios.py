"""RatioStats: all that an importance weight may look at, and its single-device reference."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from pnpo_megatron.algorithm.fixed_point import to_grid
from pnpo_megatron.algorithm.select import all_true, zero_outside_


@dataclass(frozen=True)
class RatioStats:
    """Log-ratio statistics of every token, complete for its whole response. Nothing carries a gradient.

    All fields broadcast to the shape of `token`: [T] packed, or [B, T] padded. Slots outside the response
    hold something harmless (log-ratio 0, a position of at least 1), never NaN from padding.
    """

    token: Tensor
    """The log-ratio log rho_t = policy - old, float32 (float64 if the inputs were)."""
    prefix_sum: Tensor
    """sum of log rho_k over k <= t, float64."""
    response_sum: Tensor
    """sum of log rho_k over the whole response, float64."""
    position: Tensor
    """t = 1..L, counted over trained tokens only."""
    length: Tensor
    """L, at least 1."""
    compute_preceding_min: Callable[[], Tensor]
    """Only MinPRO needs it, so it is not computed before it is asked for."""
    suffix_sums: Callable[[Tensor], tuple[Tensor, Tensor]] = field(kw_only=True)
    """Of values, 0 off the mask: the sum over k >= t of the same response, and over all of it; float64, on
    the grid. For Eq. 6 and for renormalising; collective where sequences are split."""

    @cached_property
    def preceding_min(self) -> Tensor:
        """Minimum of log rho_k over k < t; 0 at t = 1, where nothing precedes."""
        return self.compute_preceding_min()


def log_ratios(policy_logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Log-ratios, policy - old, in float32 or better; exactly 0 off the mask, whatever is stored there.

    Both are widened before they are subtracted: bfloat16 -12.34567 and -12.34467 are the same number.
    """
    check_same_shape(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs, response_mask=response_mask)
    dtype = torch.promote_types(torch.promote_types(policy_logprobs.dtype, old_logprobs.dtype), torch.float32)
    difference = policy_logprobs.detach().to(dtype) - old_logprobs.detach().to(dtype)
    return zero_outside_(difference, response_mask)


@torch.no_grad()
def padded_ratio_stats(policy_logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> RatioStats:
    """Statistics of padded responses, one a row.

    Args:
        policy_logprobs, old_logprobs: [B, T], nats, of any float type.
        response_mask: [B, T] bool, any pattern: left padding and masked tool tokens do not advance t.
    """
    token = log_ratios(policy_logprobs, old_logprobs, response_mask)
    prefix_sum = to_grid(token).cumsum_(-1)
    return RatioStats(
        token=token,
        prefix_sum=prefix_sum,
        response_sum=prefix_sum[..., -1:],
        position=_positions(response_mask),
        length=count_tokens(response_mask)[..., None].clamp_(min=1),
        compute_preceding_min=lambda: _preceding_min(token, response_mask),
        suffix_sums=_suffix_sums,
    )


@torch.no_grad()
def packed_ratio_stats(
    policy_logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor, cu_seqlens: Tensor
) -> RatioStats:
    """Statistics of packed sequences that no context parallelism has split.

    Args:
        policy_logprobs, old_logprobs: [T], nats, of any float type.
        response_mask: [T] bool.
        cu_seqlens: [S+1] int, from 0 to T.
    """
    arrays = (policy_logprobs, old_logprobs, response_mask)
    lengths = cu_seqlens.diff().tolist()
    if sum(lengths) != policy_logprobs.shape[-1]:
        raise ValueError(f"cu_seqlens ends at {sum(lengths)}, but {policy_logprobs.shape[-1]} tokens came")
    rows = zip(*(torch.split(array, lengths) for array in arrays), strict=True)
    pieces = [padded_ratio_stats(*row) for row in rows]
    join = torch.cat
    return RatioStats(
        token=join([piece.token for piece in pieces]),
        prefix_sum=join([piece.prefix_sum for piece in pieces]),
        response_sum=join([piece.response_sum.expand_as(piece.token) for piece in pieces]),
        position=join([piece.position.expand_as(piece.token) for piece in pieces]),
        length=join([piece.length.expand_as(piece.token) for piece in pieces]),
        compute_preceding_min=lambda: join([piece.preceding_min for piece in pieces]),
        suffix_sums=lambda values: _packed_suffix_sums(values, lengths),
    )


def _suffix_sums(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., T] of one response a row -> ([..., T], [..., 1])."""
    suffix = to_grid(values).flip(-1).cumsum(-1).flip(-1)
    return suffix, suffix[..., :1]


def _packed_suffix_sums(values: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    sums = [_suffix_sums(row) for row in torch.split(values, lengths)]
    return torch.cat([one for one, _ in sums]), torch.cat([total.expand_as(one) for one, total in sums])


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError naming the first tensor whose shape differs from the first one's."""
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != reference.shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, but {first} is {list(reference.shape)}")


def count_tokens(response_mask: Tensor) -> Tensor:
    """[...] int32: True entries of each row."""
    if response_mask.device.type != "cpu":
        return response_mask.sum(-1, dtype=torch.int32)
    if all_true(response_mask):
        return torch.full(response_mask.shape[:-1], response_mask.shape[-1], dtype=torch.int32)
    # A few rows at a time: a sum into another type first copies all it is given. float32 holds the counts.
    rows = response_mask.reshape(-1, response_mask.shape[-1]).view(torch.int8).split(16)
    counts = torch.cat([block.float().sum(-1) for block in rows])
    return counts.to(torch.int32).view(response_mask.shape[:-1])


def _positions(response_mask: Tensor) -> Tensor:
    """[B, T] int t of every slot, at least 1; [T] where every row starts in column 0 and has no hole.

    The usual layout costs nothing then. Other devices would have to be waited for, so they always count.
    """
    if all_true(response_mask):
        return torch.arange(1, response_mask.shape[-1] + 1, device=response_mask.device)
    if response_mask.device.type == "cpu" and response_mask.shape[-1] > 1:
        starts = response_mask[..., 1:] > response_mask[..., :-1]
        if not starts.view(torch.uint8).max():
            return torch.arange(1, response_mask.shape[-1] + 1)
    return response_mask.cumsum(-1, dtype=torch.int32).clamp_(min=1)


def _preceding_min(token: Tensor, response_mask: Tensor) -> Tensor:
    """Exclusive running minimum over the masked tokens of the last dimension."""
    inclusive = torch.where(response_mask, token, torch.inf).cummin(-1).values
    exclusive = torch.full_like(inclusive, torch.inf)
    exclusive[..., 1:] = inclusive[..., :-1]
    return exclusive.masked_fill_(exclusive == torch.inf, 0.0)
