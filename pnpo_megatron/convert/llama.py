"""Llama 2, 3 and 3.x, and models saved as Llama, such as SmolLM2 and R1-Distill-Llama."""

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.family import Family, dense_rows
from pnpo_megatron.convert.hf_config import HfConfig, read_dense, refuse_window


def read(config: HfConfig) -> Architecture:
    """No biases, no query or key norms. transformers ignores ``sliding_window`` here, vLLM does not."""
    arch = read_dense(config, "llama")
    refuse_window(config, arch)
    return arch


FAMILY = Family("llama", "LlamaForCausalLM", read, dense_rows)
