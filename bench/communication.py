"""What context-parallel ranks send each other for the objective, against gathering log-probs.

    OMP_NUM_THREADS=1 python bench/communication.py [--ranks 2 4 8] [--rounds 31] [--out FOLDER]

32 responses of 15,360 tokens, zigzag over C gloo processes. Bytes are counted at the collective, for the
whole objective: ratio statistics, loss, backward. Other trainers gather the log-probs of all ranks and undo
the zigzag, and only then can they sum. Two pairs take turns: "exchange", what replaces "gather" (un-permuting
included), and "scan", the prefix sums with their exchange, against "gather and sum".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import Bound, Row, on_ranks, options, report, take_turns
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pnpo_megatron.algorithm import make_objective, policy_loss
from pnpo_megatron.parallel.chunk_exchange import earlier_sums
from pnpo_megatron.parallel.cp_layout import inverse_index, local_index
from pnpo_megatron.parallel.prefix_scan import prefix_scan, ratio_stats

RESPONSES, LENGTH = 32, 15_360
_SENT: dict[str, tuple[int, Callable[[int], float]]] = {
    "_allgather_base_": (1, lambda ranks: ranks - 1),
    "allgather_": (1, lambda ranks: ranks - 1),
    "alltoall_base_": (1, lambda ranks: (ranks - 1) / ranks),
    "allreduce_": (0, lambda ranks: 2 * (ranks - 1) / ranks),
}
"""Which argument of a collective is given away, and how often it goes over the wire from each of C ranks."""


class SentBytes(TorchDispatchMode):
    """Counts what every torch.distributed operation sends from this rank, below the Python wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation passes here; an unknown collective is an error, not zero bytes."""
        if func.namespace == "c10d":
            name = func._opname
            argument, share = _SENT[name]
            given = args[argument]
            self.calls.append(name)
            whole = sum(x.nbytes for x in ([given] if isinstance(given, Tensor) else given))
            self.total += whole * share(dist.get_world_size())
        return func(*args, **(kwargs or {}))


def counted(run: Callable[[], object]) -> tuple[float, list[str]]:
    """Bytes this rank sends to others by collectives in `run`, and their names."""
    with SentBytes() as sent:
        run()
    return sent.total, sent.calls


def one_rank(rounds: int) -> Row:
    """Bytes and seconds on this rank."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    chunks = torch.full((RESPONSES,), LENGTH // (2 * size))
    mine, inverse = local_index(chunks, size, rank), inverse_index(chunks, size)
    policy = (torch.randn(RESPONSES * LENGTH) * 0.01)[mine].requires_grad_()
    old = torch.zeros_like(policy)
    mask = torch.ones(len(mine), dtype=torch.bool)
    position, length = mine % LENGTH + 1, torch.full_like(mine, LENGTH)
    advantages, share = torch.ones_like(old), torch.full_like(old, 1 / (RESPONSES * LENGTH))
    objective = make_objective("pnpo")
    sums = torch.arange(2 * RESPONSES)

    def run_objective() -> None:
        stats = ratio_stats(policy, old, mask, position, length, chunks, group)
        policy_loss(objective, policy, stats, advantages, share)[0].backward()

    def gather() -> Tensor:
        everything = policy.new_empty(size * len(mine))
        dist.all_gather_single(everything, policy.detach(), group=group)
        return everything[inverse]

    runs = {
        "exchange": lambda: earlier_sums(sums, None, group),
        "gather": gather,
        "scan": lambda: prefix_scan(policy.detach(), chunks, group),
        "gather and sum": lambda: gather().view(RESPONSES, LENGTH).cumsum(1),
    }
    return {
        "sent": counted(run_objective),
        "gather sent": counted(gather),
        "seconds": take_turns(runs, rounds, before=dist.barrier),
    }


def measure(ranks: int, rounds: int) -> tuple[Row, list[Bound]]:
    """One row of the table; a round lasts as long as its slowest rank."""
    results = on_ranks(one_rank, ranks, rounds)
    sent, calls = results[0]["sent"]
    gathered, _ = results[0]["gather sent"]
    seconds = {
        name: [max(times) for times in zip(*(result["seconds"][name] for result in results), strict=True)]
        for name in results[0]["seconds"]
    }
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    fastest = {name: min(times) for name, times in seconds.items()}
    exchange, scan = middle["exchange"] / middle["gather"], middle["scan"] / middle["gather and sum"]
    row = {
        "C": ranks,
        "collectives": len(calls),
        "bytes sent": sent,
        "gather, bytes sent": gathered,
        "bytes ratio": f"1/{gathered / sent:.0f}",
        **{f"{name} (ms)": time * 1e3 for name, time in middle.items()},
        "exchange / gather": exchange,
        "scan / gather and sum": scan,
        "exchange / gather, fastest rounds": fastest["exchange"] / fastest["gather"],
    }
    bounds = [
        Bound(f"C = {ranks}: bytes against gathering", sent / gathered, 1 / 400),
        Bound(f"C = {ranks}: exchange against gather and un-permute, median time", exchange, 1 / 3),
    ]
    return row, bounds


def main() -> None:
    """One row for each C."""
    parser = options(__doc__, rounds=31)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    args = parser.parse_args()
    measured = []
    for ranks in args.ranks:
        measured.append(measure(ranks, args.rounds))
        print(f"C = {ranks} measured", flush=True)
    rows, bounds = zip(*measured, strict=True)
    report("communication", rows, [bound for some in bounds for bound in some], out=args.out)


if __name__ == "__main__":
    main()
