"""Counts what a rank hands to torch.distributed, by group and operation, below the Python wrappers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OPERATIONS = {
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allreduce_": ("all_reduce", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "allreduce_coalesced_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
NOTHING_GIVEN = {"recv_", "barrier", "monitored_barrier_"}


class SentByGroup(TorchDispatchMode):
    """Bytes of floating-point tensors and indices alike; an unknown collective is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[tuple[str, str, int]] = []
        """Group name, operation, bytes given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname not in NOTHING_GIVEN:
            operation, at = OPERATIONS[func._opname]
            given = [args[at]] if isinstance(args[at], Tensor) else args[at]
            given = [x for part in given for x in (part if isinstance(part, list | tuple) else [part])]
            group = next(dist.ProcessGroup.unbox(x) for x in args if type(x).__name__ == "ScriptObject")
            # Counts, sums of log-ratios and shapes are integers: they do not grow with the model.
            counted = sum(x.nbytes for x in given if x.is_floating_point())
            self.transfers.append((group.group_name, operation, counted))
        return func(*args, **(kwargs or {}))

    def by_operation(self, group_name: str) -> dict[str, int]:
        """Operation -> bytes handed to it in one group."""
        total: Counter[str] = Counter()
        for name, operation, given in self.transfers:
            total[operation] += given if name == group_name else 0
        return dict(total)
