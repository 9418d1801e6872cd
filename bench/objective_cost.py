"""Time and memory of the loss, forward and backward to the log-probs, against TRL 1.16's and verl 0.9.1's.

    make bench   (or: PYTHONPATH=. OMP_NUM_THREADS=1 .venv-bench/bin/python bench/objective_cost.py)

512 responses of 15,360 tokens, float32; every loss gets the same tensors and takes turns with the others.
Theirs include the few means they log, as they cannot be called without; ours are logged elsewhere. Peaks are
measured in processes of their own, above the inputs, and contain the gradient that is handed back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from measure import Bound, Row, in_fresh_process, median_ratio, options, peak_bytes, report, take_turns
from peer_losses import CLIP, Loss, check_versions, trl_loss, verl_loss
from torch import Tensor

from pnpo_megatron.algorithm import policy_loss_padded

OURS = ("pnpo", "gspo", "grpo", "minpro")
PEERS = {f"{peer} {name}": (peer, name) for peer in ("trl", "verl") for name in CLIP}
MIB = 2.0**20


@dataclass
class Problem:
    """The tensors every loss gets."""

    policy: Tensor
    old: Tensor
    advantages: Tensor
    advantages_by_token: Tensor
    mask: Tensor

    @staticmethod
    def make(responses: int, length: int, mask: str, lengths: str) -> Problem:
        """Log-ratios of spread 0.01; `lengths` "full", or "mixed": uniform from 1/16 to all of `length`."""
        torch.manual_seed(0)
        policy = -torch.rand(responses, length)
        old = policy + 0.01 * torch.randn(responses, length)
        valid = torch.full((responses, 1), length)
        if lengths == "mixed":
            valid = torch.randint(length // 16, length + 1, (responses, 1))
        taken = torch.arange(length) < valid
        advantages = torch.randn(responses)
        dtype = {"int64": torch.int64, "bool": torch.bool}[mask]
        by_token = advantages[:, None].repeat(1, length)
        return Problem(policy.requires_grad_(), old, advantages, by_token, taken.to(dtype))

    def run(self, loss: Loss, *, advantages_by_token: bool = False) -> tuple[Tensor, Tensor]:
        """The loss and its gradient."""
        advantages = self.advantages_by_token if advantages_by_token else self.advantages
        value = loss(self.policy, self.old, advantages, self.mask)
        return value.detach(), torch.autograd.grad(value, self.policy)[0]


def make_run(kind: str, problem: Problem) -> Callable[[], tuple[Tensor, Tensor]]:
    """One forward and backward pass of the loss called `kind`."""
    if kind.startswith("pnpo_megatron "):
        name = kind.split()[1]
        return lambda: problem.run(lambda *tensors: policy_loss_padded(name, *tensors))
    peer, name = PEERS[kind]
    loss = trl_loss(name) if peer == "trl" else verl_loss(name)
    return lambda: problem.run(loss, advantages_by_token=peer == "verl")


def peak(kind: str, shape: tuple[int, int, str, str]) -> float:
    """MiB above the inputs; a small pass comes first, so that what is built once does not count."""
    make_run(kind, Problem.make(4, 64, *shape[2:]))()
    run = make_run(kind, Problem.make(*shape))
    return peak_bytes(run) / MIB


def timed(kinds: list[str], shape: tuple[int, int, str, str], rounds: int) -> dict[str, list[float]]:
    """CPU seconds in turns: with one thread, wall time on an idle machine."""
    problem = Problem.make(*shape)
    return take_turns({kind: make_run(kind, problem) for kind in kinds}, rounds, clock=time.process_time)


def largest_gradient_difference(shape: tuple[int, int, str, str]) -> float:
    """Our GSPO's gradient against both peers', relative: they compute the same thing that is timed."""
    problem = Problem.make(*shape)
    ours = make_run("pnpo_megatron gspo", problem)()[1]
    theirs = [make_run(f"{peer} gspo", problem)()[1] for peer in ("trl", "verl")]
    return max(float((grad - ours).norm() / ours.norm()) for grad in theirs)


def measure(shape: tuple[int, int, str, str], rounds: int) -> tuple[list[Row], list[Bound]]:
    """One table: all losses on one set of tensors."""
    kinds = [f"pnpo_megatron {name}" for name in OURS] + list(PEERS)
    seconds = in_fresh_process(timed, kinds, shape, rounds, timeout_s=1800.0)
    peaks = {kind: in_fresh_process(peak, kind, shape) for kind in kinds}
    _, _, mask, lengths = shape
    rows = [
        {
            "loss": kind,
            "lengths": lengths,
            "mask": mask,
            "CPU ms": statistics.median(seconds[kind]) * 1e3,
            "against our pnpo": median_ratio(seconds[kind], seconds[kinds[0]]),
            "peak above inputs (MiB)": peaks[kind],
        }
        for kind in kinds
    ]
    bounds = []
    for peer in ("trl gspo", "verl gspo"):
        where = f"{lengths} lengths, {mask} mask: pnpo against {peer}"
        bounds.append(Bound(f"{where}, time", median_ratio(seconds[kinds[0]], seconds[peer]), 1.0))
        bounds.append(Bound(f"{where}, peak memory", peaks[kinds[0]] / peaks[peer], 1.0))
    return rows, bounds


def main() -> None:
    """Full and mixed lengths with the integer mask of the peers' trainers, full lengths with a bool one."""
    parser = options(__doc__, rounds=3)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--length", type=int, default=15_360)
    args = parser.parse_args()
    check_versions()
    for load in (trl_loss, verl_loss):
        load("gspo")  # imported once: every measuring process is forked from this one
    rows: list[Row] = []
    bounds = [
        Bound(
            "gradient of our gspo against the peers', relative, 8 x 512 tokens",
            in_fresh_process(largest_gradient_difference, (8, 512, "int64", "mixed")),
            1e-5,
        )
    ]
    for mask, lengths in (("int64", "full"), ("bool", "full"), ("int64", "mixed")):
        more_rows, more_bounds = measure((args.responses, args.length, mask, lengths), args.rounds)
        rows, bounds = rows + more_rows, bounds + more_bounds
    report("objective_cost", rows, bounds, out=args.out)


if __name__ == "__main__":
    main()
