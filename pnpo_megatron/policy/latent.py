"""Megatron's settings and layers for latent attention, shared experts and a grouped router (DeepSeek-V3)."""

from copy import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import TransformerConfig

from pnpo_megatron.convert.architecture import Architecture, Yarn
from pnpo_megatron.policy.cp_attention import SdpaCoreAttention
from pnpo_megatron.policy.spec import RmsNorm, group_experts

if not isinstance(multi_latent_attention.TELinear, type):
    # Megatron-Core 0.16.1 takes a stand-in for TransformerEngine, and asks isinstance of what is no class.
    multi_latent_attention.HAVE_TE = False


class LatentNorm(RmsNorm):
    """Norm of a latent; transformers leaves its eps at 1e-6, whatever ``rms_norm_eps`` says."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


def latent_fields(arch: Architecture) -> dict[str, Any]:
    """Fields of MLATransformerConfig beyond those of a plain mixture of experts."""
    latent = arch.latent
    assert latent is not None
    grouped = latent.groups > 1
    return {
        "qk_layernorm": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": arch.rope.theta,
        **_positions(latent.yarn),
        "moe_layer_freq": [int(layer >= latent.dense_layers) for layer in range(arch.layers)],
        "moe_shared_expert_intermediate_size": latent.shared_ffn,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # the correction is part of the model, not of its training
        "moe_router_num_groups": latent.groups if grouped else None,
        "moe_router_group_topk": latent.chosen_groups if grouped else None,
        "moe_router_topk_scaling_factor": latent.scale,
    }


def _positions(yarn: Yarn | None) -> dict[str, Any]:
    if yarn is None:
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def latent_block_spec(config: TransformerConfig, *, vp_stage: int | None) -> Any:
    """The layers of one stage, the first ones dense, with our norms and attention."""
    plain = copy(config)
    plain.moe_grouped_gemm = False  # Megatron would take a package's experts; ours come below
    spec = get_gpt_decoder_block_spec(
        plain, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = SdpaCoreAttention
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
        group_experts(layer, config)
    spec.layer_norm = RmsNorm
    return spec
