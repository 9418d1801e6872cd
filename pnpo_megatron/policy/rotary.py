"""Rotary positions of a pack in one step.

Megatron cuts the pack into its sequences, asks the device for their lengths and makes the angles anew for the
queries and for the keys of every layer; here one gather makes them once a micro-batch.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch.distributed import ProcessGroup

from pnpo_megatron.parallel.groups import group_rank, group_size

MEGATRONS = rope_utils._apply_rotary_pos_emb_thd
"""What `use_packed_rotary` replaces."""
_latest: tuple[Any, ...] = (None, None)
"""Angles of one pack and what they are of. Not kept on `freqs`: Megatron uses that for later packs too."""


def use_packed_rotary() -> None:
    """Put `packed_rotary` in the place of Megatron's function, which calls it by this name."""
    rope_utils._apply_rotary_pos_emb_thd = packed_rotary


def packed_rotary(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """Turn every head of every token by its position in its own sequence; bit for bit Megatron's function.

    Args:
        t: [T, heads, d] of this rank, zigzag order.
        cu_seqlens: [S+1] cumulative padded lengths of the whole sequences.
        freqs: [longest, 1, 1, r] angles by position; the first r <= d numbers of a head are turned.
    """
    cos, sin = _angles(t, cu_seqlens, freqs, mscale, cp_group)
    turned, rest = (t, None) if freqs.shape[-1] == t.shape[-1] else t.tensor_split([freqs.shape[-1]], dim=-1)
    if multi_latent_attention:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    turned = turned * cos + rope_utils._rotate_half(turned, rotary_interleaved) * sin
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def _angles(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, mscale: float, cp_group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """([T, 1, r] cosines, the same of sines); those of the latest pack are at hand for its next layer."""
    global _latest
    same = _latest[0] is cu_seqlens and _latest[1] is freqs
    if not same or _latest[2:4] != (mscale, t.dtype):
        places = positions(cu_seqlens, len(t), group_size(cp_group), group_rank(cp_group))
        angles = freqs.flatten(1).index_select(0, places).unsqueeze(1)
        turns = ((turn(angles) * mscale).to(t.dtype) for turn in (torch.cos, torch.sin))
        _latest = (cu_seqlens, freqs, mscale, t.dtype, *turns)
    return _latest[4], _latest[5]


def positions(cu_seqlens: Tensor, tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """[tokens] position of each local token in its sequence, of which a rank has chunks r and 2C-1-r."""
    lengths = cu_seqlens.diff() // cp_size

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(lengths, output_size=tokens)

    local = torch.arange(tokens, device=cu_seqlens.device) - spread(cu_seqlens[:-1] // cp_size)
    if cp_size == 1:
        return local
    half = spread(lengths // 2)
    return local + half * torch.where(local < half, cp_rank, 2 * cp_size - 2 - cp_rank)
