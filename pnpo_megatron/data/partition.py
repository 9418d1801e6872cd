"""Which sequence goes into which micro-batch on which rank: integers only, the same answer on every rank."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pnpo_megatron.errors import ConfigError

Plan = tuple[tuple[tuple[int, ...], ...], ...]
"""[data rank][micro-batch] -> rows of the mini-batch, longest first; () is a micro-batch without any."""


@dataclass(frozen=True)
class Layout:
    """What the packing has to know about the split."""

    max_tokens: int
    """Padded tokens of a micro-batch on one rank, after the context-parallel split."""
    data_size: int = 1
    """Data-parallel ranks (expert parallelism lies inside them)."""
    context_size: int = 1
    tensor_size: int = 1
    count_multiple: int = 1
    """Micro-batches a rank come in multiples of this: the pipeline size under virtual pipelining."""
    padded: bool = False
    """Pad every sequence of a micro-batch to its longest, instead of packing it as it is."""

    @property
    def multiple(self) -> int:
        """Sequences are padded to a multiple of this: two zigzag chunks a rank, each divisible over TP."""
        return 2 * self.context_size * self.tensor_size

    @property
    def capacity(self) -> int:
        """Padded tokens one context-parallel group holds in a micro-batch."""
        return self.max_tokens * self.context_size

    def pad(self, length: int) -> int:
        """The length of a sequence after padding; an empty one still fills one multiple."""
        return max(-(-length // self.multiple), 1) * self.multiple


def plan_micro_batches(lengths: Sequence[int], layout: Layout) -> Plan:
    """Spread the sequences of a mini-batch evenly over data-parallel ranks and micro-batches.

    Longest-processing-time: longest first, each into the least filled micro-batch. Every rank gets the same
    number of micro-batches, the smallest that respects the budget, so collectives stay in step (TRAPS H37).

    Args:
        lengths: tokens of each sequence, prompt and response; the plan depends on nothing else.

    Raises:
        ConfigError: a sequence is longer than the budget; the message names the value needed.
    """
    padded = [layout.pad(length) for length in lengths]
    _check_budget(lengths, padded, layout)
    bins = _equal_length_bins(padded, layout) if layout.padded else _balanced_bins(padded, layout)
    loads = [_load(rows, padded, layout.padded) for rows in bins]
    return _deal(bins, loads, layout.data_size)


def _check_budget(lengths: Sequence[int], padded: Sequence[int], layout: Layout) -> None:
    longest = max(padded, default=0)
    if longest > layout.capacity:
        needed = longest // layout.context_size
        raise ConfigError(
            f"batching.max_tokens = {layout.max_tokens} cannot hold a sequence of {max(lengths)} tokens "
            f"({longest} padded to a multiple of {layout.multiple}, over {layout.context_size} "
            f"context-parallel ranks); set batching.max_tokens = {needed} or more"
        )


def _round_up(count: int, layout: Layout) -> int:
    """Micro-batches over all ranks: equal on each, and a multiple of what the schedule needs."""
    quantum = layout.data_size * layout.count_multiple
    return max(-(-count // quantum), 1) * quantum


def _balanced_bins(padded: Sequence[int], layout: Layout) -> list[list[int]]:
    """Least-filled bin first, with as few bins as the budget allows."""
    order = sorted(range(len(padded)), key=lambda row: (-padded[row], row))
    halves = sum(2 * length > layout.capacity for length in padded)  # no two of these fit together
    count = _round_up(max(-(-sum(padded) // layout.capacity), halves), layout)
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        heap = [(0, index) for index in range(count)]
        for row in order:
            load, index = heap[0]
            if load + padded[row] > layout.capacity:
                break
            bins[index].append(row)
            heapq.heapreplace(heap, (load + padded[row], index))
        else:
            return bins
        count = _round_up(count + 1, layout)


def _equal_length_bins(padded: Sequence[int], layout: Layout) -> list[list[int]]:
    """Neighbours in length share a bin, which costs its longest times its count."""
    order = sorted(range(len(padded)), key=lambda row: (-padded[row], row))
    bins: list[list[int]] = []
    for row in order:
        if bins and padded[bins[-1][0]] * (len(bins[-1]) + 1) <= layout.capacity:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins + [[] for _ in range(_round_up(len(bins), layout) - len(bins))]


def _load(rows: Sequence[int], padded: Sequence[int], equal_length: bool) -> int:
    if not rows:
        return 0
    return padded[rows[0]] * len(rows) if equal_length else sum(padded[row] for row in rows)


def _deal(bins: list[list[int]], loads: list[int], data_size: int) -> Plan:
    """Heaviest micro-batch first to the rank that has least, each rank the same number."""
    each = len(bins) // data_size
    heap = [(0, rank) for rank in range(data_size)]
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(data_size)]
    for index in sorted(range(len(bins)), key=lambda index: (-loads[index], index)):
        load, rank = heapq.heappop(heap)
        dealt[rank].append(tuple(bins[index]))
        if len(dealt[rank]) < each:
            heapq.heappush(heap, (load + loads[index], rank))
    return tuple(tuple(rank_bins) for rank_bins in dealt)
