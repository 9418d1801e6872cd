"""The experts of one rank in two grouped matrix products, instead of three small ones for each."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn.functional import grouped_mm


class GroupedExperts(SequentialMLP):
    """Parameters, names and checkpoints are SequentialMLP's; torch's own grouped product needs no package.

    SwiGLU without biases, as all families with experts have it.
    """

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """[tokens, hidden] sorted by expert, [experts] counts and [tokens] weights to [tokens, hidden]."""
        if not len(hidden):
            return super().forward(hidden, tokens_per_expert, probs)
        for part in (one for expert in self.local_experts for one in (expert.linear_fc1, expert.linear_fc2)):
            for hook in part._forward_pre_hooks.values():  # overlap_param_gather waits for weights in these
                hook(part, ())
        ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32)
        both = _product(hidden, [one.linear_fc1.weight for one in self.local_experts], ends)
        if self.config.bias_activation_fusion:
            inner = weighted_bias_swiglu_impl(both, None, probs.unsqueeze(-1), False)
        else:
            gate, up = both.chunk(2, dim=-1)
            inner = (self.config.activation_func(gate) * up * probs.unsqueeze(-1)).to(both.dtype)
        return _product(inner, [one.linear_fc2.weight for one in self.local_experts], ends), None


def _product(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Rows up to `ends[i]` times `weights[i]` transposed; for backward weights are joined anew, not kept."""
    joined = torch.stack(tuple(weights))
    place = joined.untyped_storage().data_ptr()

    def pack(kept: Tensor) -> Any:
        return None if kept.untyped_storage().data_ptr() == place else kept

    def unpack(kept: Any) -> Tensor:
        return torch.stack(tuple(weights)).detach().transpose(1, 2) if kept is None else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return grouped_mm(rows, joined.transpose(1, 2), offs=ends)
