"""Qwen 3 with a mixture of experts in every layer."""

from dataclasses import replace

from pnpo_megatron.convert.architecture import Architecture, Experts
from pnpo_megatron.convert.family import Family, Row, expert_rows
from pnpo_megatron.convert.hf_config import HfConfig, read_dense


def read(config: HfConfig) -> Architecture:
    """``intermediate_size`` is of dense layers, of which there are none; transformers 5 renamed
    ``num_experts``."""
    values = config.values
    for key, fine in (
        ("mlp_only_layers", []),
        ("decoder_sparse_step", 1),
        ("shared_expert_intermediate_size", 0),
    ):
        if values.get(key) not in (None, fine):
            raise config.refuse(key, f"only {fine} is supported: experts in every layer, none shared")
    if not config.flag("use_qk_norm", default=True):
        raise config.refuse("use_qk_norm", "this family always norms q and k; only true is supported")
    experts = Experts(
        count=config.integer("num_experts" if values.get("num_experts") is not None else "num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        ffn=config.integer("moe_intermediate_size"),
        renormalise=config.flag("norm_topk_prob"),
    )
    return replace(read_dense(config, "qwen3_moe", qk_norm=True), experts=experts)


def layer_rows(arch: Architecture) -> tuple[Row, ...]:
    """The names of a dense MLP, once for every expert."""
    return expert_rows(arch, "mlp", "gate_proj", "up_proj", "down_proj")


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, layer_rows)
