"""Settings of what learns: the model and its layout, the objective, the optimizer."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pnpo_megatron.config.run import Section


class ModelConfig(Section):
    """The trained model."""

    hf: Path
    """Hugging Face folder: config.json, safetensors, tokenizer. Code in it is never run."""
    init: Path | None = None
    """Megatron checkpoint whose weights a new run starts from, instead of those of `hf`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: list[Literal["core_attn", "layernorm", "mlp", "moe"]] = ["core_attn"]
    """What recompute = "selective" runs again in the backward pass."""
    fused_swiglu: bool | None = None
    """Keep three of five MLP activations, compute the others again for backward; None does so on GPUs."""
    moe_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts."""
    moe_bias_rate: NonNegativeFloat = 0.0
    """How far an update moves each expert's bias towards an even load; for routers that have such a bias."""
    grouped_experts: bool = False
    """Compute a rank's experts in one grouped product each way instead of one after the other."""
    router_replay: bool | Literal["rollout"] = False
    """Send each token to the experts that its old log-probs saw, in all epochs of a batch; "rollout": old
    log-probs too, to those that it was sampled with (GPUs only)."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    logprob_chunk: PositiveInt = 1024
    """Tokens that go through the output layer at once; bounds the memory of logits."""


class ParallelConfig(Section):
    """Megatron-Core's splits; data parallelism takes the ranks that are left."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    sequence: bool = False

    @model_validator(mode="after")
    def _splits_fit_together(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "parallel.sequence = true splits over parallel.tensor = 1; use tensor = 2 or more, "
                "or sequence = false"
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_pipeline = {self.virtual_pipeline} needs parallel.pipeline of at least 2; "
                "use virtual_pipeline = 1"
            )
        return self


class ObjectiveConfig(Section):
    """A preset by name; a key that is given overrides the preset's."""

    name: Literal["pnpo", "gspo", "grpo", "cumulative", "minpro"] = "pnpo"
    weight: str | None = None
    """``token | prefix | cumulative | minpro | sequence | tempered`` or ``module:function``."""
    alpha: float | None = Field(None, ge=0.0, le=1.0)
    """Of the weight ``tempered``: log C_t / t^alpha; 0 is cumulative, 1 is prefix."""
    gate: Literal["sqrt", "flat", "clip", "none"] | None = None
    mean: Literal["response", "token"] | None = None
    score: Literal["token", "prefix"] | None = None
    """Each coefficient on its own token's score (Eq. 11), or on those of its whole prefix (Eq. 6)."""
    kl_coef: NonNegativeFloat = 0.0
    """Of the KL estimate to the run's first weights (k3), added to the loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Of the entropy of every trained token's distribution, subtracted from the loss."""
    renormalise: bool = False
    """Means over accepted tokens: rejected ones leave the denominators too. The paper keeps them in."""
    gate_low: PositiveFloat | None = None
    gate_high: PositiveFloat | None = None
    clip_low: PositiveFloat | None = None
    clip_high: PositiveFloat | None = None
    dual_clip: PositiveFloat | None = None
    gate_reference_length: PositiveInt | None = None
    advantage_std: Literal["population", "sample", "none"] = "population"
    epochs: PositiveInt = 4
    """Policy-update epochs per rollout batch (K)."""
    mini_batch: PositiveInt = 64
    """Prompt groups per optimizer update."""
    old_logprobs: Literal["learner", "rollout"] = "learner"
    stop_rejected: float | None = Field(None, gt=0.0, lt=1.0)
    """Leave the batch after the update whose rejected fraction passes this."""

    @model_validator(mode="after")
    def _only_the_policy_loss_is_renormalised(self) -> Self:
        if self.renormalise and (self.kl_coef or self.entropy_coef):
            raise ValueError(
                "objective.renormalise = true multiplies the whole gradient at the end, what kl_coef and "
                "entropy_coef add to it as well; use kl_coef = 0 and entropy_coef = 0, or renormalise = false"
            )
        return self


class OptimizerConfig(Section):
    """AdamW over Megatron-Core's (distributed) optimizer; no decay on biases and 1-D parameters."""

    lr: PositiveFloat = 1e-6
    warmup_steps: NonNegativeInt = 10
    """Rollout batches, not updates: the rate is constant within a step."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    weight_decay: NonNegativeFloat = 0.1
    clip_grad: NonNegativeFloat = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    distributed: bool = True
    offload: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the optimizer's state and work that is the host's (GPUs only)."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    max_skipped: PositiveInt = 8
    """Non-finite updates in a row after which the run stops."""


class BatchingConfig(Section):
    """Micro-batches."""

    max_tokens: PositiveInt = 16384
    """Padded tokens one rank holds after the context-parallel split."""
    layout: Literal["packed", "padded"] = "packed"
