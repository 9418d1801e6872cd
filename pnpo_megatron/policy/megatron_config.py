"""Megatron's configuration of an HF architecture on a layout."""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from pnpo_megatron.convert.architecture import Architecture, Experts
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.parallel.settings import ParallelSettings, check_layout, stage_layout
from pnpo_megatron.policy.latent import latent_fields


def transformer_config(
    arch: Architecture,
    parallel: ParallelSettings,
    *,
    dtype: torch.dtype,
    recompute: str = "none",
    **overrides: Any,
) -> TransformerConfig:
    """Megatron's configuration of an architecture on a layout.

    Args:
        dtype: float32 or bfloat16, of the parameters and the activations.
        recompute: "none", "selective" (core attention) or "full" (every layer).
        overrides: fields of TransformerConfig set last, for example ``deterministic_mode``.

    Raises:
        ConfigError: a layout, dtype or recompute setting that cannot work.
        ConversionError: a tensor-parallel size that does not divide the widths.
    """
    check_layout(arch, parallel)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"model.dtype = {dtype}: use float32 or bfloat16")
    fields: dict[str, Any] = {
        **_shape_fields(arch),
        **_layout_fields(arch, parallel),
        **_recompute_fields(recompute),
        **(_expert_fields(arch.experts) if arch.experts else {}),
        **(latent_fields(arch) if arch.latent else {}),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,
        # Every parameter is overwritten by the HF weights, and the loader checks that none is left out.
        # Switching `perform_initialization` off instead would also leave out the marks by which the gradient
        # norm tells tensor-parallel shards from copies.
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _leave_unset),
        "cuda_graph_scope": [],
        **overrides,
    }
    config = (MLATransformerConfig if arch.latent else TransformerConfig)(**fields)
    _check_messages(config)
    if "layernorm" in (config.recompute_modules or ()) and find_spec("transformer_engine") is None:
        # tensor_parallel/random.py:589 asks TransformerEngine about fp8, whatever the type.
        raise ConfigError(
            'model.recompute_modules has "layernorm": Megatron-Core 0.16.1 can run norms again only where '
            "TransformerEngine is installed; leave it out"
        )
    return config


def _check_messages(config: TransformerConfig) -> None:
    """Refuse what Megatron-Core 0.16 computes wrongly without a word.

    With two ranks a stage's neighbours before and after are the same rank; sent in one batch, its four
    messages are told apart by nothing.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    if config.pipeline_model_parallel_size == 2 and virtual and not config.overlap_p2p_comm:
        raise ConfigError(
            f"parallel.pipeline = 2 with virtual_pipeline = {virtual} and overlap_p2p_comm = False: stages "
            "would take each other's messages and train on wrong numbers; set overlap_p2p_comm = True and "
            "batch_p2p_comm = False"
        )


def _leave_unset(weight: Tensor) -> None:
    """An initialisation that does nothing."""


def _shape_fields(arch: Architecture) -> dict[str, Any]:
    return {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
    }


def experts_overrides(
    arch: Architecture, *, aux_loss: float, bias_rate: float, replay: bool, grouped: bool
) -> dict[str, Any]:
    """Fields of TransformerConfig that settings of a mixture of experts stand for.

    Raises:
        ConfigError: such a setting, and a model without experts, or without a bias of experts.
    """
    keys = {
        "router_replay": replay,
        "moe_aux_loss": aux_loss,
        "moe_bias_rate": bias_rate,
        "grouped_experts": grouped,
    }
    if arch.experts is None and any(keys.values()):
        key = next(key for key, value in keys.items() if value)
        raise ConfigError(f"model.{key} = {keys[key]}: {arch.family} has no experts; leave it out")
    if bias_rate and arch.latent is None:
        raise ConfigError(
            f"model.moe_bias_rate = {bias_rate}: the router of {arch.family} has no bias of experts; use "
            "model.moe_aux_loss"
        )
    balancing = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": aux_loss}
    return {
        **(balancing if aux_loss else {}),
        **({"moe_enable_routing_replay": True} if replay else {}),
        **({"moe_grouped_gemm": True} if grouped else {}),
    }


def _layout_fields(arch: Architecture, parallel: ParallelSettings) -> dict[str, Any]:
    interleaved = parallel.virtual_pipeline > 1
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if interleaved else None,
        "pipeline_model_parallel_layout": stage_layout(
            arch.layers, parallel.pipeline, parallel.virtual_pipeline
        ),
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.sequence,
        # Packs differ in length, so stages tell each other the shape first.
        "variable_seq_lengths": parallel.pipeline > 1,
        # Checked for dense models too: the default dispatcher needs a fixed length.
        "moe_token_dispatcher_type": "alltoall",
        # Without overlap, Megatron silently mixes up the four messages of PP 2 with virtual stages.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _recompute_fields(recompute: str) -> dict[str, Any]:
    choices: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    if recompute not in choices:
        raise ConfigError(f"model.recompute = {recompute!r}: use none, selective or full")
    return choices[recompute]


def _expert_fields(experts: Experts) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        # A softmax over the chosen experts alone equals choosing first and rescaling to 1.
        "moe_router_pre_softmax": not experts.renormalise,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }
