"""What a model family is: how its config is read, and which HF tensors make up which Megatron tensor.

A family is one small file with a `Family` in it, built from the rows here; `families.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.hf_config import HfConfig
from pnpo_megatron.convert.layouts import GATE_UP, QKV, SINGLE, VOCAB, Layout


@dataclass(frozen=True)
class Row:
    """HF tensors on one side, one Megatron parameter on the other. ``{layer}`` and ``{expert}`` are filled in
    by `at`."""

    hf: tuple[str, ...]
    dims: tuple[str, ...]
    """The shape of each HF tensor, in the letters of `shape_of`."""
    megatron: str
    layout: Layout
    tp_dim: int | None
    """Dimension of the fused tensor that tensor parallelism cuts; None where every rank holds all of it."""

    def at(self, **indices: int) -> Row:
        """The row of one layer, or of one expert in it."""
        names = tuple(name.format(**indices) for name in self.hf)
        return Row(names, self.dims, self.megatron.format(**indices), self.layout, self.tp_dim)


@dataclass(frozen=True)
class Family:
    """How one family of models is read and laid out."""

    model_type: str
    architecture: str
    """The only entry of ``architectures`` that is this model with a language-model head."""
    read: Callable[[HfConfig], Architecture]
    layer_rows: Callable[[Architecture], tuple[Row, ...]]
    """Rows of one layer; a row with ``{expert}`` in it is repeated for every expert."""
    first_rows: Callable[[Architecture], tuple[Row, ...]] | None = None
    """Rows of each layer before `Latent.dense_layers`."""


def shape_of(dims: str, arch: Architecture) -> tuple[int, ...]:
    """The sizes behind the letters: V vocabulary, h hidden, q and k projection widths, d head, f MLP, e
    experts, m expert MLP; with latents a query's, c the other, r that and positions, n queries, u keys
    without positions and values, o values, s shared experts."""
    experts, latent = arch.experts, arch.latent
    sizes = {
        "V": arch.vocab,
        "h": arch.hidden,
        "q": arch.heads * arch.head_dim,
        "k": arch.kv_heads * arch.head_dim,
        "d": arch.head_dim,
        "f": arch.ffn,
        "e": experts.count if experts else 0,
        "m": experts.ffn if experts else 0,
    }
    if latent is not None:
        sizes |= {
            "a": latent.query_rank or 0,
            "c": latent.rank,
            "r": latent.rank + latent.rope_dim,
            "n": arch.heads * arch.head_dim,
            "u": arch.heads * (latent.plain_dim + latent.value_dim),
            "o": arch.heads * latent.value_dim,
            "s": latent.shared_ffn,
        }
    return tuple(sizes[letter] for letter in dims)


EMBEDDING = Row(("model.embed_tokens.weight",), ("Vh",), "embedding.word_embeddings.weight", VOCAB, 0)
FINAL_NORM = Row(("model.norm.weight",), ("h",), "decoder.final_layernorm.weight", SINGLE, None)
HEAD = Row(("lm_head.weight",), ("Vh",), "output_layer.weight", VOCAB, 0)


def layer_row(hf: dict[str, str], megatron: str, layout: Layout, tp_dim: int | None) -> Row:
    """A row of one layer from short names: HF name to shape letters, then the Megatron name."""
    names = tuple(f"model.layers.{{layer}}.{name}" for name in hf)
    return Row(names, tuple(hf.values()), f"decoder.layers.{{layer}}.{megatron}", layout, tp_dim)


def _qkv(kind: str, rest: str) -> Row:
    hf = {
        f"self_attn.{part}_proj.{kind}": width + rest for part, width in (("q", "q"), ("k", "k"), ("v", "k"))
    }
    return layer_row(hf, f"self_attention.linear_qkv.{kind}", QKV, 0)


INPUT_NORM = layer_row({"input_layernorm.weight": "h"}, "input_layernorm.weight", SINGLE, None)
QKV_WEIGHT, QKV_BIAS = _qkv("weight", "h"), _qkv("bias", "")
Q_NORM = layer_row({"self_attn.q_norm.weight": "d"}, "self_attention.q_layernorm.weight", SINGLE, None)
K_NORM = layer_row({"self_attn.k_norm.weight": "d"}, "self_attention.k_layernorm.weight", SINGLE, None)
ATTENTION_OUT = layer_row({"self_attn.o_proj.weight": "hq"}, "self_attention.linear_proj.weight", SINGLE, 1)
MLP_NORM = layer_row({"post_attention_layernorm.weight": "h"}, "pre_mlp_layernorm.weight", SINGLE, None)
MLP_IN = layer_row(
    {"mlp.gate_proj.weight": "fh", "mlp.up_proj.weight": "fh"}, "mlp.linear_fc1.weight", GATE_UP, 0
)
MLP_OUT = layer_row({"mlp.down_proj.weight": "hf"}, "mlp.linear_fc2.weight", SINGLE, 1)


def attention_rows(arch: Architecture) -> tuple[Row, ...]:
    """The attention half of a layer, with the norm in front of the other half."""
    bias = (QKV_BIAS,) if arch.qkv_bias else ()
    norms = (Q_NORM, K_NORM) if arch.qk_norm else ()
    return (INPUT_NORM, QKV_WEIGHT, *bias, *norms, ATTENTION_OUT, MLP_NORM)


def dense_rows(arch: Architecture) -> tuple[Row, ...]:
    """One layer of a dense model."""
    return (*attention_rows(arch), MLP_IN, MLP_OUT)


def expert_rows(arch: Architecture, block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """One layer of a mixture of experts, with the HF names of the block and of an expert's three matrices."""
    expert, megatron = f"{block}.experts.{{expert}}", "mlp.experts.local_experts.{expert}"
    return (
        *attention_rows(arch),
        layer_row({f"{block}.gate.weight": "eh"}, "mlp.router.weight", SINGLE, None),
        layer_row(
            {f"{expert}.{gate}.weight": "mh", f"{expert}.{up}.weight": "mh"},
            f"{megatron}.linear_fc1.weight",
            GATE_UP,
            0,
        ),
        layer_row({f"{expert}.{down}.weight": "hm"}, f"{megatron}.linear_fc2.weight", SINGLE, 1),
    )
