"""DeepSeek-V3 and models saved as it: latent attention, shared experts, a grouped router."""

from dataclasses import replace
from itertools import filterfalse

from pnpo_megatron.convert.architecture import Architecture, Experts, Latent, Yarn
from pnpo_megatron.convert.family import (
    ATTENTION_OUT,
    INPUT_NORM,
    MLP_IN,
    MLP_NORM,
    MLP_OUT,
    Family,
    Row,
    expert_rows,
    layer_row,
)
from pnpo_megatron.convert.hf_config import HfConfig, positive_number, read_dense
from pnpo_megatron.convert.layouts import GATE_UP, SINGLE

# What these keys may say; where they are absent it is what transformers computes.
_ONLY = {
    "rope_interleave": True,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


def read(config: HfConfig) -> Architecture:
    """``auto_map`` is no obstacle: transformers and vLLM have this family themselves. ``head_dim`` is not the
    head's width."""
    for key, only in _ONLY.items():
        if config.values.get(key, only) != only:
            raise config.refuse(key, f"only {only!r} is supported")
    values = {key: value for key, value in config.values.items() if key not in ("auto_map", "head_dim")}
    key, yarn = _yarn(config)
    if yarn:
        values[key] = {"rope_theta": config.values[key].get("rope_theta")}
    dense = read_dense(HfConfig(values, config.source), "deepseek_v3")
    if dense.kv_heads != dense.heads:
        raise config.refuse("num_key_value_heads", f"must be num_attention_heads = {dense.heads}")
    if dense.rope.kind != "default":
        raise config.refuse(key, "only default and yarn positions are supported for this family")
    latent = replace(_latent(config), yarn=yarn)
    experts = Experts(
        count=config.integer("n_routed_experts"),
        per_token=config.integer("num_experts_per_tok"),
        ffn=config.integer("moe_intermediate_size"),
        renormalise=True,
    )
    _check_groups(config, latent, experts)
    width = latent.plain_dim + latent.rope_dim
    return replace(dense, head_dim=width, experts=experts, latent=latent)


def _yarn(config: HfConfig) -> tuple[str, Yarn | None]:
    """The key that says so, and the numbers; transformers' defaults where they are absent."""
    key = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    scaling = config.values.get(key)
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return key, None

    def number(name: str, default: float | None = None) -> float:
        return positive_number(config, f"{key}.{name}", scaling.get(name, default))

    if scaling.get("attention_factor") is not None or scaling.get("truncate") is False:
        raise config.refuse(key, "attention_factor and truncate = false are not supported")
    return key, Yarn(
        factor=number("factor"),
        original_positions=int(number("original_max_position_embeddings")),
        beta_fast=number("beta_fast", 32),
        beta_slow=number("beta_slow", 1),
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
    )


def _latent(config: HfConfig) -> Latent:
    dense_layers = config.values.get("first_k_dense_replace")
    if type(dense_layers) is not int or dense_layers < 0:
        raise config.refuse("first_k_dense_replace", "expected a whole number")
    return Latent(
        query_rank=None if config.values.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        rank=config.integer("kv_lora_rank"),
        plain_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        dense_layers=dense_layers,
        shared_ffn=config.integer("n_shared_experts") * config.integer("moe_intermediate_size"),
        groups=config.integer("n_group"),
        chosen_groups=config.integer("topk_group"),
        scale=config.number("routed_scaling_factor"),
    )


def _check_groups(config: HfConfig, latent: Latent, experts: Experts) -> None:
    """A group's score is the sum of its best two; Megatron takes the best per_token / chosen_groups."""
    if latent.rope_dim % 2:
        raise config.refuse("qk_rope_head_dim", "must be even: rotary positions turn pairs")
    if experts.count % latent.groups or latent.chosen_groups > latent.groups:
        raise config.refuse("n_group", f"{experts.count} experts, of which topk_group groups are chosen")
    if latent.groups > 1 and experts.per_token // latent.chosen_groups != 2:
        raise config.refuse(
            "num_experts_per_tok", f"only 2 x topk_group = {2 * latent.chosen_groups} is supported"
        )


def _attention(arch: Architecture) -> tuple[Row, ...]:
    assert arch.latent is not None
    names = {"kv_a_proj_with_mqa": ("rh", "linear_kv_down_proj"), "kv_a_layernorm": ("c", "kv_layernorm")}
    names["kv_b_proj"] = ("uc", "linear_kv_up_proj")
    if arch.latent.query_rank is None:
        names["q_proj"] = ("nh", "linear_q_proj")
    else:
        names |= {"q_a_proj": ("ah", "linear_q_down_proj"), "q_a_layernorm": ("a", "q_layernorm")}
        names["q_b_proj"] = ("na", "linear_q_up_proj")
    projections = (
        layer_row({f"self_attn.{hf}.weight": dims}, f"self_attention.{megatron}.weight", SINGLE, None)
        for hf, (dims, megatron) in names.items()
    )
    out = replace(ATTENTION_OUT, dims=("ho",))
    return (INPUT_NORM, *projections, out, MLP_NORM)


def first_rows(arch: Architecture) -> tuple[Row, ...]:
    """A layer before the first with experts."""
    return (*_attention(arch), MLP_IN, MLP_OUT)


def layer_rows(arch: Architecture) -> tuple[Row, ...]:
    """A layer with experts. The router's correction of scores is a buffer, float32 in any model."""
    attention = _attention(arch)
    routed = expert_rows(arch, "mlp", "gate_proj", "up_proj", "down_proj")
    shared = {f"mlp.shared_experts.{name}_proj.weight": "sh" for name in ("gate", "up")}
    down = {"mlp.shared_experts.down_proj.weight": "hs"}
    return (
        *attention,
        layer_row({"mlp.gate.e_score_correction_bias": "e"}, "mlp.router.expert_bias", SINGLE, None),
        layer_row(shared, "mlp.shared_experts.linear_fc1.weight", GATE_UP, None),
        layer_row(down, "mlp.shared_experts.linear_fc2.weight", SINGLE, None),
        *filterfalse(lambda row: "self_attn" in row.hf[0] or "layernorm" in row.hf[0], routed),
    )


FAMILY = Family("deepseek_v3", "DeepseekV3ForCausalLM", read, layer_rows, first_rows)
