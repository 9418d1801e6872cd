"""Learner against engine: same weights, same tokens, two programs. A bias of the gate width eats the gate."""

import torch
from torch import Tensor

from pnpo_megatron.algorithm.correction import Correction
from pnpo_megatron.algorithm.regularise import k3
from pnpo_megatron.errors import MismatchError
from pnpo_megatron.types import RolloutBatch


def log_ratios(batch: RolloutBatch) -> list[Tensor]:
    """Gap d = learner - engine of the trained tokens' log-probs, [L] float64 nats a scored response."""
    return [
        (sequence.old_logprobs - sequence.rollout_logprobs)[sequence.response_mask].double()
        for sequence in batch.sequences
        if sequence.old_logprobs is not None
    ]


def mismatch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """What two programs make of the same weights and tokens, on a scored batch.

    Tokens were drawn by the engine. `mismatch/kl` estimates KL(engine || learner) by exp(d) - 1 - d,
    `mismatch/kl_reverse` KL(learner || engine) by exp(d) d - (exp(d) - 1): neither is ever negative; the
    mean of -d, unbiased and noisy, is -`mismatch/mean`. `mismatch/ess_token` and `ess_sequence` are effective
    sample sizes (sum w)^2 / (n sum w^2) of the weights exp(d) of tokens, and of responses: 1 is no mismatch.
    """
    gaps = log_ratios(batch)
    gap = torch.cat(gaps) if gaps else torch.zeros(0, dtype=torch.float64)
    if not len(gap):
        gap = torch.zeros(1, dtype=torch.float64)
    sequences = torch.stack([one.sum() for one in gaps if len(one)] or [gap.sum()])
    return {
        "mismatch/mean": float(gap.mean()),
        "mismatch/mean_abs": float(gap.abs().mean()),
        "mismatch/max_abs": float(gap.abs().max()),
        "mismatch/kl": float((gap.expm1() - gap).mean()),
        "mismatch/kl_reverse": float((gap.exp() * gap - gap.expm1()).mean()),
        "mismatch/ess_token": _effective(gap),
        "mismatch/ess_sequence": _effective(sequences),
    }


def reference_metrics(batch: RolloutBatch) -> dict[str, float]:
    """`kl/reference`, nats a trained token: how far a batch's policy is from the run's first weights."""
    found = [
        k3(one.old_logprobs, one.reference_logprobs)[one.response_mask].double()
        for one in batch.sequences
        if one.old_logprobs is not None and one.reference_logprobs is not None
    ]
    return {"kl/reference": float(torch.cat(found).mean())} if found else {}


def _effective(log_weights: Tensor) -> float:
    weights = (log_weights - log_weights.max()).exp()
    return float(weights.sum().square() / weights.square().sum() / len(weights))


def correction_metrics(batch: RolloutBatch, correction: Correction) -> dict[str, float]:
    """What `correction` does to a scored batch, over its trained tokens."""
    factors = torch.cat(
        [
            correction.factors(one.old_logprobs, one.rollout_logprobs, one.response_mask)[one.response_mask]
            for one in batch.sequences
            if one.old_logprobs is not None
        ]
    )
    if not len(factors):
        return {}
    limited = (factors == 0) if correction.mask else factors >= factors.new_tensor(correction.cap)
    return {
        "correction/mean": float(factors.mean()),
        "correction/min": float(factors.min()),
        "correction/max": float(factors.max()),
        "correction/limited_fraction": float(limited.double().mean()),
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
