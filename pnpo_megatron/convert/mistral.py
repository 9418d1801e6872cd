"""Mistral without a sliding window: 7B from v0.2 on, Nemo."""

from __future__ import annotations

from pnpo_megatron.convert.architecture import Architecture, HfConfig, read_dense
from pnpo_megatron.convert.family import Family, dense_rows


def read(config: HfConfig) -> Architecture:
    """A window at least as long as the positions is none; where the key is absent transformers takes 4096."""
    arch = read_dense(config, "mistral")
    window = config.values.get("sliding_window", 4096)
    if window is not None and not (isinstance(window, int) and window >= arch.max_positions):
        raise config.refuse(
            "sliding_window",
            f"shorter than max_position_embeddings = {arch.max_positions} (4096 where absent); sliding "
            f"windows are not "
            "supported, only null is",
        )
    return arch


FAMILY = Family("mistral", "MistralForCausalLM", read, dense_rows)
