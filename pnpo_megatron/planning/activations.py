"""What the forward pass of one micro-batch leaves for backward; checked against measured models to 15 %.

Every term is a tensor that some module saves; sizes are bytes a token of this rank.
"""

from dataclasses import dataclass

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.parallel.settings import ParallelSettings, padded_vocab_size

KEPT_LOGITS, BLOCK = 256 * 2**20, 32 * 2**20
"""Bounds of the chunked head (parallel/vocab_logprobs.py): logits kept, and one block of them."""


@dataclass(frozen=True)
class Modules:
    """How a layer is run."""

    itemsize: int
    recompute: str = "none"
    engine: bool = True
    """Kernels of GPUs, TransformerEngine's or torch's: norms save their input alone."""
    fused_swiglu: bool = False
    length: float = 0.0
    """Tokens of the sequence that a token belongs to, on average; masks, outside kernels, grow with it."""


def layer_bytes(arch: Architecture, parallel: ParallelSettings, modules: Modules) -> float:
    """Saved bytes a token in one layer, without recomputation."""
    size, tensor = modules.itemsize, parallel.tensor
    hidden = arch.hidden / (tensor if parallel.sequence else 1)
    query, key = arch.heads * arch.head_dim / tensor, arch.kv_heads * arch.head_dim / tensor
    norms = 2 * hidden * (2 * size if modules.engine else 8 + size)  # plain norms work on float32 copies
    if modules.engine:
        attention = (3 * query + 3 * key) * size
    else:  # groups of sequences are copied out, padded by about a fifth, and joined again
        copies, mask = 1.0, 0.0
        if parallel.context > 1:  # two chunks a rank, with all keys before them, gathered; float masks
            copies = parallel.context + 0.5
            mask = copies / (2 * parallel.context) * modules.length
        attention = (1.2 * (2 * query + 2 * copies * key + mask) + query) * size
        if arch.qk_norm:
            attention += (
                8 * query + (8 if size == 2 else 4) * key + (0 if size == 2 else 4 * (query + 2 * key))
            )
    if arch.experts is None:
        return norms + attention + (3 if modules.fused_swiglu else 5) * arch.ffn / tensor * size
    routed = arch.experts.per_token / (tensor if parallel.sequence else 1)
    inner = (4 if modules.fused_swiglu else 6) * arch.experts.ffn
    return norms + attention + routed * (arch.hidden + inner) * size


def saved_bytes(
    arch: Architecture, parallel: ParallelSettings, modules: Modules, *, tokens: int, layers: int, last: bool
) -> float:
    """Saved by `layers` layers (and the final norm on the last stage) for one micro-batch.

    Args:
        tokens: T of this rank.
    """
    hidden = arch.hidden / (parallel.tensor if parallel.sequence else 1)
    whole = layer_bytes(arch, parallel, modules)
    edge = hidden * (modules.itemsize if modules.engine else 8) if last else 0
    if modules.recompute == "full":
        return tokens * (hidden * modules.itemsize * layers + edge)
    return tokens * (whole * layers + edge)


def working_bytes(arch: Architecture, parallel: ParallelSettings, modules: Modules, *, tokens: int) -> float:
    """The layer that is being computed, beside what is saved: gradients, and its recomputed tensors."""
    whole = layer_bytes(arch, parallel, modules)
    return tokens * (whole if modules.recompute == "full" else whole / 4)


def logits_bytes(arch: Architecture, parallel: ParallelSettings, *, tokens: int) -> float:
    """The chunked head: hidden states of scored tokens with their gradient, logits kept, and blocks."""
    columns = padded_vocab_size(arch.vocab, parallel.tensor) / parallel.tensor
    return min(KEPT_LOGITS, 4 * tokens * columns) + 3 * BLOCK + tokens * arch.hidden * 8


def in_flight(parallel: ParallelSettings, stage: int, micro_batches: int) -> float:
    """Micro-batches (of one stage's layers) whose activations are held at once: 1F1B, or interleaved."""
    ahead, virtual = parallel.pipeline - stage, parallel.virtual_pipeline
    if virtual == 1:
        return min(ahead, micro_batches)
    chunks = (ahead - 1) * 2 + (virtual - 1) * parallel.pipeline + 1
    return min(chunks, micro_batches * virtual) / virtual
