"""Learner against engine: same weights, same tokens, two programs. A bias of the gate width eats the gate."""

from __future__ import annotations

import torch

from pnpo_megatron.errors import MismatchError
from pnpo_megatron.types import RolloutBatch


def mismatch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Gap d = learner - engine of every trained token's log-prob, nats, on a scored batch.

    `mismatch/kl` estimates KL(engine || learner) by exp(d) - 1 - d, which is never negative.
    All are 0 when nothing is trained.
    """
    gaps = [
        (sequence.old_logprobs - sequence.rollout_logprobs)[sequence.response_mask].double()
        for sequence in batch.sequences
        if sequence.old_logprobs is not None
    ]
    gap = torch.cat(gaps) if gaps else torch.zeros(0, dtype=torch.float64)
    if not len(gap):
        return dict.fromkeys(("mismatch/mean", "mismatch/mean_abs", "mismatch/max_abs", "mismatch/kl"), 0.0)
    return {
        "mismatch/mean": float(gap.mean()),
        "mismatch/mean_abs": float(gap.abs().mean()),
        "mismatch/max_abs": float(gap.abs().max()),
        "mismatch/kl": float((gap.expm1() - gap).mean()),
    }


def check_mismatch(metrics: dict[str, float], limit: float, when: str) -> None:
    """Stop the run when learner and engine do not hold the same model.

    Raises:
        MismatchError: the mean gap exceeds `limit` (rollout.max_mismatch), or is not a number.
    """
    gap = metrics["mismatch/mean_abs"]
    if not gap <= limit:
        raise MismatchError(
            f"{when}: learner and engine differ by {gap:.3g} nats a token on the same weights, over "
            f"rollout.max_mismatch = {limit}. Compare model.dtype with the engine's, try "
            "rollout.enforce_eager = true, check rope and chat template of the model folder; raise the limit "
            "only if the gap is understood"
        )
