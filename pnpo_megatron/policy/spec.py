"""Which modules a transformer layer is made of, with TransformerEngine and without."""

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pnpo_megatron.policy.cp_attention import SdpaCoreAttention
from pnpo_megatron.policy.experts import GroupedExperts


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm that works under sequence parallelism, which Megatron's torch norm refuses.

    Each rank sees part of the tokens there, so the weight's gradient is a part too; the mark makes Megatron
    add the parts over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        # Set as an attribute of the parameter, where finalize_model_grads looks for it.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


class BiasedLinear(ColumnParallelLinear):
    """Adds the bias within the matrix product, as transformers and vLLM do, where one rank holds all columns.

    Added to the product it is rounded once more, which 30 layers turn into 5e-5 of a logit.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs["bias"] is not None and self.tp_group.size() == 1:
            return torch.nn.functional.linear(input, weight, kwargs["bias"])
        output: Tensor = super()._forward_impl(input, weight, *args, **kwargs)
        return output


def uses_transformer_engine(
    backend: str = "auto", *, cuda: bool | None = None, installed: bool | None = None
) -> bool:
    """Which layers a model gets: TransformerEngine's where it and a GPU are there, else Megatron's own.

    Args:
        backend: model.attention_backend; "local" asks for the plain ones.
        cuda, installed: what to decide for; None asks this machine.
    """
    cuda = torch.cuda.is_available() if cuda is None else cuda
    installed = find_spec("transformer_engine") is not None if installed is None else installed
    return cuda and installed and backend != "local"


def block_spec(config: TransformerConfig, *, transformer_engine: bool, vp_stage: int | None) -> Any:
    """The spec of a whole transformer block.

    Args:
        transformer_engine: fused modules, or the plain ones of Megatron-Core with our norm and attention.
        vp_stage: virtual pipeline stage, None without virtual stages.
    """
    if transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
        )
        group_experts(spec, config)
        return spec
    layer = local_layer_spec(config)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RmsNorm)


def local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """One layer without TransformerEngine: packed sequences and context parallelism through our attention."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = RmsNorm
    layer.submodules.pre_mlp_layernorm = RmsNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    if config.add_qkv_bias:
        attention.linear_qkv = BiasedLinear
    if config.qk_layernorm:
        attention.q_layernorm = RmsNorm
        attention.k_layernorm = RmsNorm
    group_experts(layer, config)
    return layer


def group_experts(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Compute a layer's experts together, if it has any and `moe_grouped_gemm` asks for it."""
    experts = getattr(getattr(layer.submodules.mlp, "submodules", None), "experts", None)
    if config.moe_grouped_gemm and experts is not None:
        experts.module = GroupedExperts
