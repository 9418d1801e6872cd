"""Every model family that can be read, and what a whole model is made of."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pnpo_megatron.convert import deepseek_v3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.family import EMBEDDING, FINAL_NORM, HEAD, Family, Row, shape_of
from pnpo_megatron.convert.hf_config import HfConfig
from pnpo_megatron.errors import ConversionError

FAMILIES = {
    module.FAMILY.model_type: module.FAMILY
    for module in (deepseek_v3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe)
}


def family_of(config: HfConfig) -> Family:
    """The family of a config.json.

    Raises:
        ConversionError: an unknown family, or a head that is not a language model's.
    """
    model_type = config.values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise config.refuse("model_type", f"supported are {', '.join(sorted(FAMILIES))}")
    if config.values.get("architectures") not in (None, [family.architecture]):
        raise config.refuse(
            "architectures", f"supported for {family.model_type} is [{family.architecture!r}]"
        )
    return family


def read_architecture(values: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """The architecture that a parsed config.json describes; `source` is its path, for messages.

    Raises:
        ConversionError: anything that cannot be represented, named by key and value.
    """
    config = HfConfig(values, source)
    return family_of(config).read(config)


def all_rows(arch: Architecture) -> Iterator[Row]:
    """Every row of the whole model, filled in, in export order. A tied head has no row of its own (TRAPS
    H25)."""
    yield EMBEDDING
    family, first = FAMILIES[arch.family], arch.latent.dense_layers if arch.latent else 0
    rows = {False: family.layer_rows(arch), True: family.first_rows(arch) if family.first_rows else ()}
    for layer in range(arch.layers):
        for row in rows[layer < first]:
            if "{expert}" in row.megatron and arch.experts:
                yield from (row.at(layer=layer, expert=expert) for expert in range(arch.experts.count))
            else:
                yield row.at(layer=layer)
    yield FINAL_NORM
    if not arch.tied:
        yield HEAD


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor the model has on the HF side, in export order."""
    return {
        name: shape_of(dims, arch)
        for row in all_rows(arch)
        for name, dims in zip(row.hf, row.dims, strict=True)
    }


def is_float32(name: str) -> bool:
    """Whether an HF tensor stays float32 in a model of another dtype: a router's correction of scores."""
    return name.endswith("e_score_correction_bias")


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """In which dtype an HF tensor is kept in a model of ``dtype``."""
    return torch.float32 if is_float32(name) else dtype


def check_tensor_parallel(arch: Architecture, size: int) -> None:
    """Refuse a tensor-parallel size that the widths do not allow.

    Raises:
        ConversionError: naming the sizes that work.
    """

    def fits(tp: int) -> bool:
        widths = (arch.heads, arch.kv_heads, *(() if arch.experts else (arch.ffn,)))  # experts are not cut
        return all(width % tp == 0 for width in widths)

    if not fits(size):
        works = ", ".join(str(tp) for tp in range(1, arch.kv_heads + 1) if fits(tp))
        raise ConversionError(
            f"parallel.tensor = {size} does not divide {arch.heads} query heads, {arch.kv_heads} key-value "
            f"heads and MLP width {arch.ffn}; use {works}"
        )
