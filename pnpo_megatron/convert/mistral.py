"""Mistral without a sliding window: 7B from v0.2 on, Nemo."""

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.family import Family, dense_rows
from pnpo_megatron.convert.hf_config import HfConfig, read_dense, refuse_window


def read(config: HfConfig) -> Architecture:
    """A window at least as long as the positions is none; where the key is absent transformers takes 4096."""
    arch = read_dense(config, "mistral")
    refuse_window(config, arch, absent=4096)
    return arch


FAMILY = Family("mistral", "MistralForCausalLM", read, dense_rows)
