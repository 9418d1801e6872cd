"""Start-up self-check: what learner and engine make of a short batch, against the width of the gate."""

from collections.abc import Sequence

import torch

from pnpo_megatron.rollout.mismatch import log_ratios
from pnpo_megatron.types import RolloutBatch

WORRYING_SHARE = 0.1
"""Of the gate's half-width, from which on a bias deserves a warning."""
OTHER_MODEL = 0.05
"""Nats a token that no rounding explains."""


def self_check(batch: RolloutBatch, half_width: float, advice: Sequence[str]) -> str:
    """A sentence for the log: the mean log-ratio at lag 0, its standard error, and its share of the gate.

    Args:
        batch: a few responses, scored by the learner with the weights that the engine holds.
        half_width: the gate's narrower side at the longest response.
        advice: what to change, see `advice_for`; added when the bias is worrying.
    """
    gap = torch.cat(log_ratios(batch))
    if len(gap) < 2:
        return "self-check: too few tokens to compare learner and engine; raise rollout.sync_check"
    mean, stderr = float(gap.mean()), float(gap.std() / len(gap) ** 0.5)
    share = abs(mean) / half_width
    text = (
        f"self-check: learner - engine = {mean:+.2g} ± {stderr:.1g} nats a token on the same weights "
        f"({len(gap)} tokens), {100 * share:.2g} % of the gate's half-width of {half_width:g}"
    )
    if share < WORRYING_SHARE or abs(mean) < 2 * stderr:
        return text
    return f"warning: {text}. " + "; ".join(advice)


def advice_for(
    mean_abs: float, *, dtype: str, graphs: bool, scaled_rope: bool, old_logprobs: str
) -> list[str]:
    """What fits a gap of `mean_abs` nats a token, likeliest first.

    Args:
        graphs: the engine replays captured graphs (rollout.enforce_eager is off on a GPU).
        scaled_rope: the model folder scales its rotary positions.
    """
    advice = []
    if mean_abs > OTHER_MODEL:
        rope = "scaled rope (rope_scaling in config.json)" if scaled_rope else "rope_theta in config.json"
        advice.append(
            f"no rounding explains {mean_abs:.2g} nats: the two hold different models. Check {rope}, and "
            "that data.template fits the model"
        )
    if old_logprobs == "rollout":
        advice.append('objective.old_logprobs = "learner" takes this bias out of the gate')
    if dtype == "bfloat16":
        advice.append(
            'bfloat16 rounds differently in two programs: model.dtype = "float32" if memory allows, else '
            'rollout.correction = "token"'
        )
    if graphs:
        advice.append("rollout.enforce_eager = true shows whether captured graphs are the cause")
    return advice or ["learner and engine differ for a reason unknown here: look at engine.log"]
