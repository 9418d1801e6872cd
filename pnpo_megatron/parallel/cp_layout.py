"""The zigzag layout of packed sequences over context-parallel ranks: integers only, no collectives.

Each padded sequence is cut into 2C equal chunks; rank r of C holds chunk r, then chunk 2C-1-r. Under a causal
mask that gives every rank the same work. C = 1 is the same rule: both halves, in order.
"""

import torch
from torch import Tensor


def local_index(chunk_lengths: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Slots of the padded sequences, laid end to end, that one rank holds, in the order it holds them.

    Args:
        chunk_lengths: [S] int64, tokens of one chunk of each sequence, padded length / (2C).
    Returns:
        [T] int64, T = 2 * sum(chunk_lengths).
    """
    whole = 2 * cp_size * chunk_lengths
    begin = whole.cumsum(0) - whole
    first = begin + cp_rank * chunk_lengths
    second = begin + (2 * cp_size - 1 - cp_rank) * chunk_lengths
    return _ranges(torch.stack([first, second], dim=1).flatten(), chunk_lengths.repeat_interleave(2))


def inverse_index(chunk_lengths: Tensor, cp_size: int) -> Tensor:
    """Where each slot of the padded sequences lies once the ranks' local arrays are joined in rank order.

    ``torch.cat(locals)[inverse_index(...)]`` is the natural order.

    Args:
        chunk_lengths: [S] int64, as for `local_index`.
    Returns:
        [C * T] int64.
    """
    chunk = torch.arange(2 * cp_size, device=chunk_lengths.device)
    rank = torch.minimum(chunk, 2 * cp_size - 1 - chunk)
    local = 2 * chunk_lengths
    begin = (local.cumsum(0) - local)[:, None] + rank * local.sum()
    starts = begin + (chunk >= cp_size) * chunk_lengths[:, None]
    return _ranges(starts.flatten(), chunk_lengths.repeat_interleave(2 * cp_size))


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The integer ranges [start, start + length), joined."""
    shift = starts - (lengths.cumsum(0) - lengths)
    expanded = shift.repeat_interleave(lengths)
    return expanded + torch.arange(expanded.numel(), device=starts.device)
