"""Qwen 3, dense."""

from __future__ import annotations

from pnpo_megatron.convert.architecture import Architecture, HfConfig, read_dense
from pnpo_megatron.convert.family import Family, dense_rows


def read(config: HfConfig) -> Architecture:
    """Norms on every head of q and k, which no key announces; no biases."""
    if config.flag("use_sliding_window"):
        raise config.refuse("use_sliding_window", "sliding windows are not supported; only false is")
    return read_dense(config, "qwen3", qk_norm=True)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, dense_rows)
