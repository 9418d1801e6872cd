"""Qwen 1.5, 2 and 2.5, and R1-Distill-Qwen."""

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.family import Family, dense_rows
from pnpo_megatron.convert.hf_config import HfConfig, read_dense


def read(config: HfConfig) -> Architecture:
    """Biases on q, k and v, which no key announces; ``sliding_window`` counts only if ``use_sliding_window``
    is true."""
    return read_dense(config, "qwen2", qkv_bias=True)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, dense_rows)
