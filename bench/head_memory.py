"""Memory and time of the output layer of R1-Distill-Qwen-1.5B: log-probs from hidden states, and back.

    OMP_NUM_THREADS=1 python bench/head_memory.py [--tokens 2048 4096] [--rounds 2] [--long] [--out FOLDER]

h = 1,536, V = 151,936, bfloat16 hidden states and weights, weight gradients accumulated in float32 in place.
Each peak is measured in a process of its own, above the inputs, the weights and the gradients of both. The
dense pass is what one writes without thinking: float32 logits, log_softmax, autograd. It takes turns with
ours in one process and needs 4 GiB at 1,024 tokens; --rounds 0 leaves it out. --long is one peak at 15,360
tokens (9 CPU minutes), a result of its own.
"""

from __future__ import annotations

import os
import statistics
import time

import torch
from measure import Bound, Row, in_fresh_process, median_ratio, options, peak_bytes, report, take_turns
from torch import Tensor

from pnpo_megatron.parallel.vocab_logprobs import chunked_logprobs

HIDDEN, VOCAB = 1536, 151_936
TIMED_TOKENS = 1024
LONG = 15_360
GIB = 2.0**30
LIMIT_GIB = 0.7


class Problem:
    """Inputs of one pass, every gradient already there: `weight.main_grad` as Megatron's DDP keeps it."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, HIDDEN).bfloat16().requires_grad_()
        self.weight = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16).normal_(0, 0.02).requires_grad_()
        self.labels = torch.randint(0, VOCAB, (tokens,))
        self.slope = torch.randn(tokens)
        self.hidden.grad = torch.ones_like(self.hidden)
        self.weight.main_grad = torch.ones(VOCAB, HIDDEN)  # type: ignore[attr-defined]

    def ours(self) -> None:
        """Forward and backward in blocks."""
        logprobs, _ = chunked_logprobs(
            self.hidden, self.weight, self.labels, temperature=1.0, vocab_size=VOCAB, tp_group=None
        )
        (logprobs @ self.slope).backward()
        self.weight.grad = None  # empty: the gradient is in main_grad

    def dense(self) -> None:
        """Forward and backward through [T, V] float32 logits."""
        logits = torch.nn.functional.linear(self.hidden.float(), self.weight.float())
        logprobs = logits.log_softmax(-1).gather(1, self.labels[:, None])[:, 0]
        (logprobs @ self.slope).backward()
        grad: Tensor = self.weight.grad  # type: ignore[assignment]
        self.weight.main_grad.add_(grad)  # type: ignore[attr-defined]
        self.weight.grad = None


def peak(tokens: int, kind: str) -> tuple[float, float]:
    """(GiB above inputs, weights and their gradients, CPU seconds) of one pass, on all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    problem = Problem(tokens)
    start = time.process_time()
    above = peak_bytes(getattr(problem, kind))
    return above / GIB, time.process_time() - start


def timed(tokens: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of our pass and the dense one, in turns: with one thread, wall time on an idle machine."""
    Problem(64).ours()  # what is built once
    Problem(64).dense()
    problem = Problem(tokens)
    runs = {"ours": problem.ours, "dense": problem.dense}
    return take_turns(runs, rounds, warm_up=False, clock=time.process_time)


def main() -> None:
    """Peaks at each number of tokens, then the time against the dense pass."""
    parser = options(__doc__, rounds=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--long", action="store_true", help="one peak at 15,360 tokens, nothing else")
    args = parser.parse_args()
    rows: list[Row] = []
    bounds: list[Bound] = []
    for tokens in [LONG] if args.long else args.tokens:
        gib, seconds = in_fresh_process(peak, tokens, "ours", timeout_s=3600.0)
        rows.append(_row(tokens, "ours", gib, seconds))
        bounds.append(Bound(f"{tokens:,} tokens: peak (GiB)", gib, LIMIT_GIB))
        print(rows[-1], flush=True)
    if args.rounds and not args.long:
        gib, _ = in_fresh_process(peak, TIMED_TOKENS, "dense", timeout_s=3600.0)
        seconds = in_fresh_process(timed, TIMED_TOKENS, args.rounds, timeout_s=7200.0)
        rows.append(_row(TIMED_TOKENS, "ours, in turns", "", statistics.median(seconds["ours"])))
        rows.append(_row(TIMED_TOKENS, "dense, in turns", gib, statistics.median(seconds["dense"])))
        ratio = median_ratio(seconds["ours"], seconds["dense"])
        bounds.append(Bound(f"{TIMED_TOKENS:,} tokens: time against the dense pass", ratio, 1.2))
    report("head_memory_long" if args.long else "head_memory", rows, bounds, out=args.out)


def _row(tokens: int, kind: str, gib: float | str, seconds: float) -> Row:
    return {
        "tokens": tokens,
        "pass": kind,
        "peak above (GiB)": gib,
        "CPU s": seconds,
        "ms a token": seconds / tokens * 1e3,
    }


if __name__ == "__main__":
    main()
