"""What one rank holds of weights, gradients and optimizer state: exact, buffers and padding included."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.families import FAMILIES
from pnpo_megatron.convert.family import EMBEDDING, FINAL_NORM, HEAD, Row, shape_of
from pnpo_megatron.parallel.settings import ParallelSettings, padded_vocab_size, stage_layout

# Megatron's order of a layer's modules; buffers are laid out in it, backwards.
_MODULES = ("input_layernorm", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm", "pre_mlp", "mlp")


@dataclass(frozen=True)
class Chunk:
    """Elements of the parameters of one model chunk on one rank, in Megatron's order."""

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    """Reduced over the ranks that hold the same experts, so kept in a buffer of their own."""
    layers: int
    shared: int = 0
    """Elements of an embedding that first and last stage share: a bucket of its own."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def chunks_of(arch: Architecture, parallel: ParallelSettings, stage: int) -> list[Chunk]:
    """The model chunks of the ranks of one pipeline stage, one a virtual stage."""
    stages = parallel.pipeline * parallel.virtual_pipeline
    layout = stage_layout(arch.layers, parallel.pipeline, parallel.virtual_pipeline)
    counts = [arch.layers // stages] * stages if layout is None else [one.count("decoder") for one in layout]
    own = [stage + parallel.pipeline * virtual for virtual in range(parallel.virtual_pipeline)]
    return [_chunk(arch, parallel, counts[at], first=at == 0, last=at == stages - 1) for at in own]


def _chunk(arch: Architecture, parallel: ParallelSettings, layers: int, *, first: bool, last: bool) -> Chunk:
    split = parallel.tensor > 1 or parallel.expert > 1  # else experts are ordinary parameters

    def size(row: Row) -> int:
        elements = sum(math.prod(shape_of(dims, arch)) for dims in row.dims)
        if row in (EMBEDDING, HEAD):
            elements = padded_vocab_size(arch.vocab, parallel.tensor) * arch.hidden
        cut = row.tp_dim is not None and "{expert}" not in row.megatron  # experts are never cut
        return elements // parallel.tensor if cut else elements

    rows = sorted(
        FAMILIES[arch.family].layer_rows(arch),
        key=lambda row: next(at for at, module in enumerate(_MODULES) if module in row.megatron),
    )
    dense: list[int] = []
    experts: list[int] = []
    layer: list[int] = []
    each: list[int] = []
    for row in rows:
        (each if "{expert}" in row.megatron else layer).append(size(row))
    each = each * (arch.experts.count // parallel.expert if arch.experts else 0)
    one_copy = arch.tied and parallel.pipeline * parallel.virtual_pipeline == 1
    if first:
        dense.append(size(EMBEDDING))
    for _ in range(layers):
        dense += layer if split else layer + each
        experts += each if split else []
    if last:
        dense += [size(FINAL_NORM)] + ([] if one_copy else [size(HEAD)])
    shared = size(EMBEDDING) if arch.tied and parallel.pipeline > 1 and (first or last) else 0
    return Chunk(tuple(dense), tuple(experts), layers, shared)


def state_bytes(
    chunks: Sequence[Chunk], *, itemsize: int, distributed: bool, data: int, expert_data: int, rank: int = 0
) -> StateBytes:
    """Weights, float32 gradient buffers and AdamW's state of one rank.

    Args:
        chunks: from `chunks_of`.
        itemsize: bytes of a weight: 2 (bfloat16) or 4 (float32).
        distributed: optimizer state and float32 weights are shared out over data-parallel ranks.
        data, expert_data: ranks with the same dense parameters (data x context), and with the same experts.
        rank: the place in the data-parallel group; ranks differ by padding only.
    """
    per_element = 8 if itemsize == 4 else 12  # two moments, and a float32 copy of bfloat16 weights
    weights = gradients = state = 0
    for chunk in chunks:
        for sizes, shared, ranks in ((chunk.dense, chunk.shared, data), (chunk.experts, 0, expert_data)):
            shards = [(sum(sizes), sum(sizes))]
            if distributed:
                shards = [_shard(bucket, ranks, rank % ranks) for bucket in _buckets(sizes, shared)]
            for whole, held in shards:
                weights += whole * itemsize
                gradients += whole * 4
                state += held * per_element
    return StateBytes(weights, gradients, state)


def _buckets(sizes: Sequence[int], shared: int) -> Iterator[list[int]]:
    """Parameters in the order of the buffer, backwards; a shared embedding stands alone."""
    bucket: list[int] = []
    for size in reversed(sizes):
        if shared and size == shared:
            if bucket:
                yield bucket
            yield [size]
            bucket = []
        else:
            bucket.append(size)
    if bucket:
        yield bucket


def _shard(sizes: Sequence[int], ranks: int, rank: int) -> tuple[int, int]:
    """(padded length of a bucket, elements of parameters in one rank's share of it)."""
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // 64) * 64)
        end = starts[-1] + size
    multiple = math.lcm(ranks, 128)
    length = -(-end // multiple) * multiple
    low, high = rank * length // ranks, (rank + 1) * length // ranks
    mine = sum(
        max(0, min(high, start + size) - max(low, start)) for start, size in zip(starts, sizes, strict=True)
    )
    return length, mine
