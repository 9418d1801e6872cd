"""Qwen 3, dense."""

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.family import Family, dense_rows
from pnpo_megatron.convert.hf_config import HfConfig, read_dense


def read(config: HfConfig) -> Architecture:
    """Norms on every head of q and k, which no key announces; no biases."""
    return read_dense(config, "qwen3", qk_norm=True)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, dense_rows)
