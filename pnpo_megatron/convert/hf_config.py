"""A config.json read into an `Architecture`, checked before anything is built.

Every key that changes the function a model computes is either represented there or refused by name. Both
spellings of the rotary settings are read: ``rope_theta`` with ``rope_scaling``, and transformers 5's
``rope_parameters`` (TRAPS H26).
"""

import math
from collections.abc import Mapping
from typing import Any

from pnpo_megatron.convert.architecture import Architecture, Rope
from pnpo_megatron.errors import ConversionError


class HfConfig:
    """A config.json with errors that name the file, the key and its value."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def refuse(self, key: str, why: str) -> ConversionError:
        """The error to raise for a key that cannot be represented."""
        found = json_like(self.values.get(key))
        return ConversionError(f"{self.source}: {key} = {found}: {why}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number; null counts as absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(key, "expected a positive whole number")
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        return positive_number(self, key, self.values.get(key))

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "expected true or false")
        return value


def positive_number(config: HfConfig, key: str, value: Any) -> float:
    """``value`` as a float, or an error that names ``key``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConversionError(f"{config.source}: {key} = {json_like(value)}: expected a positive number")
    return float(value)


def json_like(value: Any) -> str:
    """How a value looks in JSON, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    text = "absent or null" if value is None else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def read_rope(config: HfConfig) -> Rope:
    """Rotary settings in either spelling.

    Raises:
        ConversionError: theta is nowhere, the spellings disagree, or the scaling is of an unknown kind.
    """
    values = config.values
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    scaling = values.get(key) or {}
    if not isinstance(scaling, dict):
        raise config.refuse(key, "expected an object")
    thetas = [t for t in (values.get("rope_theta"), scaling.get("rope_theta")) if t is not None]
    if not thetas:
        raise config.refuse(
            "rope_theta",
            "neither rope_theta nor rope_parameters.rope_theta is there; add the one used "
            "in training (older Llama files that leave it out mean 10000.0)",
        )
    theta = positive_number(config, "rope_theta", thetas[0])
    if any(other != theta for other in thetas):
        raise config.refuse("rope_theta", f"{key} says {scaling.get('rope_theta')}; make the two agree")
    if scaling.get("mrope_section"):
        raise config.refuse(key, "multimodal rotary positions (mrope_section) are not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return _scaled_rope(config, key, theta, kind, scaling)


def _scaled_rope(config: HfConfig, key: str, theta: float, kind: Any, scaling: Mapping[str, Any]) -> Rope:
    def number(name: str) -> float:
        return positive_number(config, f"{key}.{name}", scaling.get(name))

    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", number("factor"))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise config.refuse(key, "high_freq_factor must be above low_freq_factor")
        return Rope(
            theta, "llama3", number("factor"), low, high, int(number("original_max_position_embeddings"))
        )
    raise config.refuse(key, f"rope type {kind!r} is not supported; default, linear and llama3 are")


def refuse_what_no_family_has(config: HfConfig) -> None:
    """Settings that would change the computation and that no family here represents."""
    values = config.values
    for key in ("quantization_config", "compression_config", "quantization"):
        found = values.get(key)
        if found:
            method = found.get("quant_method") if isinstance(found, dict) else found
            raise ConversionError(
                f"{config.source}: {key}.quant_method = {json_like(method)}: quantised weights "
                "cannot be trained; use the folder with bfloat16 or float32 weights"
            )
    for key, why in _NEVER.items():
        if values.get(key):
            raise config.refuse(key, why)
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise config.refuse("layer_types", "only full_attention layers are supported")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise config.refuse("partial_rotary_factor", "only 1.0 (all dimensions rotate) is supported")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise config.refuse("hidden_act", "only silu is supported")


_NEVER = {
    "auto_map": "the model brings its own code, which is never run; use a model without it",
    "dual_chunk_attention_config": "dual chunk attention is not supported; use the plain model",
    "use_sliding_window": "sliding windows are not supported; only false is",
    "attention_bias": "not supported for this family; only false is",
    "mlp_bias": "not supported for this family; only false is",
    "attention_sinks": "attention sinks are not supported",
    "attention_chunk_size": "chunked attention is not supported",
    "attn_logit_softcapping": "capped logits are not supported",
    "final_logit_softcapping": "capped logits are not supported",
    "num_nextn_predict_layers": "layers that predict further tokens are not supported; use a model without",
}


def refuse_window(config: HfConfig, arch: Architecture, *, absent: int | None = None) -> None:
    """Refuse a ``sliding_window`` shorter than the positions; ``absent`` is what a missing key means."""
    window = config.values.get("sliding_window", absent)
    if window is not None and not (type(window) is int and window >= arch.max_positions):
        raise config.refuse(
            "sliding_window",
            f"shorter than max_position_embeddings = {arch.max_positions}"
            f"{f' ({absent} where absent)' if absent else ''}; "
            "sliding windows are not supported, only null is",
        )


def read_dense(
    config: HfConfig, family: str, *, qkv_bias: bool = False, qk_norm: bool = False
) -> Architecture:
    """The keys that all families share.

    Raises:
        ConversionError: a key is missing, of a wrong type, or the head counts do not divide.
    """
    refuse_what_no_family_has(config)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.refuse("num_key_value_heads", f"does not divide num_attention_heads = {heads}")
    if config.values.get("head_dim") is None and hidden % heads:
        raise config.refuse(
            "num_attention_heads", f"does not divide hidden_size = {hidden}, and head_dim is absent"
        )
    head_dim = config.integer("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise config.refuse("head_dim", "must be even: rotary positions turn pairs")
    return Architecture(
        family=family,
        layers=config.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps"),
        rope=read_rope(config),
        max_positions=config.integer("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )
