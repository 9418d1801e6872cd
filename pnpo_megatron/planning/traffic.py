"""Bytes of floating point that one rank hands to collectives, by group of ranks: exact, counted in a test.

Left out are integers (prefix sums, token counts, quantiles, shapes of messages) and the norm's one number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pnpo_megatron.algorithm.diagnostics import BIN_SUMS, BINS, MAXIMA, SUMS
from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.parallel.settings import ParallelSettings
from pnpo_megatron.planning.shards import Chunk, state_bytes

CROSSING = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send": lambda n: 1,
}
"""Bytes that leave a rank for each byte it hands over, by ring algorithms among n ranks."""
TALLY = 8 * (len(SUMS) + len(BIN_SUMS) * BINS + len(MAXIMA))
"""Sums and maxima of an update's metrics, float64."""
_QUANTILES = 4 * 5


@dataclass(frozen=True)
class Transfer:
    """Bytes one rank hands to one kind of collective."""

    group: str
    """tp, cp, ep, pp, dp, or edp: data parallelism among the copies of an expert."""
    operation: str
    given: float
    backward: bool = False


def micro_batch_traffic(
    arch: Architecture,
    parallel: ParallelSettings,
    *,
    tokens: int,
    scored: int,
    layers: int,
    itemsize: int,
    first: bool = True,
    last: bool = True,
    recompute: bool = False,
) -> list[Transfer]:
    """One micro-batch through one pipeline stage, forward and backward.

    Args:
        tokens: T of this rank, after the context-parallel split.
        scored: of them, those that predict a trained token.
        layers: of this stage.
        itemsize: bytes of an activation.
        first, last: whether the stage holds the embedding, and the head.
        recompute: every layer's forward pass is run again.
    """
    found = []
    hidden = tokens * arch.hidden * itemsize
    again = 2 if recompute else 1
    if parallel.tensor > 1:
        found += _tensor(arch, parallel, hidden, scored, layers, first, last, again)
    if parallel.context > 1:
        keys = 2 * tokens * arch.kv_heads * arch.head_dim // parallel.tensor * itemsize
        found += [
            Transfer("cp", "all_gather", layers * again * keys),
            Transfer("cp", "reduce_scatter", layers * parallel.context * keys, backward=True),
        ]
    if parallel.pipeline > 1:
        sent = hidden // (parallel.tensor if parallel.sequence else 1)
        found += [] if last else [Transfer("pp", "send", sent)]
        found += [] if first else [Transfer("pp", "send", sent, backward=True)]
    if arch.experts and parallel.expert > 1:
        routed = tokens // (parallel.tensor if parallel.sequence else 1) * arch.experts.per_token
        rows = layers * routed * arch.hidden * itemsize
        weights = layers * routed * 4  # the float32 routing weights travel with the tokens, not back
        found += [
            Transfer("ep", "all_to_all", again * (2 * rows + weights)),
            Transfer("ep", "all_to_all", 2 * rows + weights, backward=True),
        ]
    return found


def _tensor(
    arch: Architecture,
    parallel: ParallelSettings,
    hidden: int,
    scored: int,
    layers: int,
    first: bool,
    last: bool,
    again: int,
) -> list[Transfer]:
    """Four joins a layer: after attention and MLP forward, before them backward."""
    found = []
    mixed = 1 if arch.experts else 2  # blocks of a layer that tensor parallelism cuts
    if parallel.sequence:
        part = hidden // parallel.tensor
        found += [
            Transfer("tp", "all_gather", again * layers * mixed * part),
            Transfer("tp", "reduce_scatter", again * layers * mixed * hidden),
            Transfer("tp", "all_gather", 2 * layers * mixed * part, backward=True),
            Transfer("tp", "reduce_scatter", layers * mixed * hidden, backward=True),
        ]
        if first:
            found += [
                Transfer("tp", "reduce_scatter", hidden),
                Transfer("tp", "all_gather", part, backward=True),
            ]
        if last:
            found += [
                Transfer("tp", "all_gather", part),
                Transfer("tp", "reduce_scatter", hidden, backward=True),
            ]
    else:
        found += [
            Transfer("tp", "all_reduce", again * layers * mixed * hidden + (hidden if first else 0)),
            Transfer("tp", "all_reduce", layers * mixed * hidden, backward=True),
        ]
        if last:
            found.append(Transfer("tp", "all_reduce", 4 * scored * arch.hidden, backward=True))
    if last:
        found.append(Transfer("tp", "all_reduce", 16 * scored))  # a maximum and three sums a token, float32
    return found


def update_traffic(
    arch: Architecture,
    parallel: ParallelSettings,
    chunks: Sequence[Chunk],
    *,
    itemsize: int,
    distributed: bool,
    data: int,
    expert_data: int,
) -> list[Transfer]:
    """Once an update: metrics, gradients, a distributed optimizer's weights; experts among their copies."""
    loads = 4 * arch.layers * arch.experts.count if arch.experts else 0  # tokens of every expert
    found = [Transfer("dp", "all_reduce", TALLY + loads)] if data > 1 else []
    if parallel.pipeline > 1:
        found.append(Transfer("pp", "all_reduce", TALLY + loads + _QUANTILES))
    dense = [replace(chunk, experts=()) for chunk in chunks]
    experts = [replace(chunk, dense=(), shared=0) for chunk in chunks]
    for group, part, ranks in (("dp", dense, data), ("edp", experts, expert_data)):
        state = state_bytes(
            part, itemsize=itemsize, distributed=distributed, data=data, expert_data=expert_data
        )
        if ranks > 1 and state.gradients and distributed:
            found.append(Transfer(group, "reduce_scatter", state.gradients))
            found.append(Transfer(group, "all_gather", state.weights / ranks))
        elif ranks > 1 and state.gradients:
            found.append(Transfer(group, "all_reduce", state.gradients))
    if parallel.sequence:  # each rank saw part of the tokens with its copy of norms and router
        copied = 2 * arch.hidden + (2 * arch.head_dim if arch.qk_norm else 0)
        copied += arch.experts.count * arch.hidden if arch.experts else 0
        layers = sum(chunk.layers for chunk in chunks)
        found.append(Transfer("tp", "all_reduce", 4 * (layers * copied + arch.hidden) + loads))
    return found


def crossing_bytes(transfers: Iterable[Transfer], group: str, ranks: int, *, backward: bool = True) -> float:
    """Bytes that leave a rank for the others of a group; the forward pass alone without `backward`."""
    return sum(
        one.given * CROSSING[one.operation](ranks)
        for one in transfers
        if one.group == group and (backward or not one.backward)
    )
