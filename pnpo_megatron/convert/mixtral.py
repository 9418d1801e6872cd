"""Mixtral: Mistral with a mixture of experts in every layer."""

from dataclasses import replace

from pnpo_megatron.convert.architecture import Architecture, Experts
from pnpo_megatron.convert.family import Family, Row, expert_rows
from pnpo_megatron.convert.hf_config import HfConfig, read_dense, refuse_window


def read(config: HfConfig) -> Architecture:
    """Experts use ``intermediate_size``; the chosen experts' weights always sum to 1, which no key says."""
    dense = read_dense(config, "mixtral")
    refuse_window(config, dense)
    experts = Experts(
        count=config.integer("num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        ffn=dense.ffn,
        renormalise=True,
    )
    return replace(dense, experts=experts)


def layer_rows(arch: Architecture) -> tuple[Row, ...]:
    """w1 is the gate, w3 goes up, w2 comes down."""
    return expert_rows(arch, "block_sparse_moe", "w1", "w3", "w2")


FAMILY = Family("mixtral", "MixtralForCausalLM", read, layer_rows)
