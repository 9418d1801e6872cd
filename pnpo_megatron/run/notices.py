"""What a run says once, for a person to read."""

from collections.abc import Iterator
from typing import Any

import torch

from pnpo_megatron.algorithm.presets import objective_settings
from pnpo_megatron.analysis.gate_model import gate_width_in_sigmas
from pnpo_megatron.config import Config
from pnpo_megatron.eval.overlap import in_prompts, warning
from pnpo_megatron.inputs import LOSS_KEYS, Inputs
from pnpo_megatron.rollout.probe import advice_for, self_check
from pnpo_megatron.types import RolloutBatch


def opening_lines(config: Config, inputs: Inputs) -> Iterator[str]:
    """Prompts, what the tolerances mean at this length, and benchmark problems that are trained on."""
    yield f"prompts: {inputs.loaded.summary}"
    values = _objective(config)
    if "gate_low" in values:
        yield gate_width_in_sigmas(
            gate_low=values["gate_low"],
            gate_high=values["gate_high"],
            length=config.rollout.max_response_tokens,
            reference_length=values.get("gate_reference_length"),
        )
    else:
        yield f"objective: {values}"
    for benchmark in inputs.benchmarks:
        if seen := in_prompts(benchmark, inputs.loaded.prompts):
            yield warning(benchmark, seen, "data.prompts")


def self_check_line(config: Config, inputs: Inputs, probed: RolloutBatch, mean_abs: float) -> str:
    """Learner against engine, as a share of the gate; see `self_check`."""
    advice = advice_for(
        mean_abs,
        dtype=config.model.dtype,
        graphs=torch.cuda.is_available() and not config.rollout.enforce_eager,
        scaled_rope=inputs.architecture.rope.kind != "default",
        old_logprobs=config.objective.old_logprobs,
    )
    values = _objective(config)
    sides = [values.get(key) for key in ("gate_low", "gate_high", "clip_low", "clip_high")]
    length = config.rollout.max_response_tokens
    scale = ((values.get("gate_reference_length") or length) / length) ** 0.5
    return self_check(probed, min(filter(None, sides), default=1.0) * scale, advice)


def _objective(config: Config) -> dict[str, Any]:
    return objective_settings(**config.objective.model_dump(include=LOSS_KEYS))
