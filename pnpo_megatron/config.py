"""Settings: one TOML file plus ``--section.key=value``, checked whole before anything is built.

Defaults are the paper's four-epoch run where it states one. Paths are relative to the working folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from pnpo_megatron.errors import ConfigError


class Section(BaseModel, frozen=True, extra="forbid"):
    """One table of the TOML file."""


class RunConfig(Section):
    """Where a run lives."""

    folder: Path = Path("runs/pnpo")
    deterministic: bool = False
    """GPUs only: bitwise resume, slower kernels. CPU runs always repeat bit for bit."""
    timeout_s: PositiveFloat = 1800.0
    """Longest wait of a rank for its peers (collectives of the learner)."""
    silence_s: NonNegativeFloat = 20.0
    """A rank that gives no sign of life for so long counts as dead, and the others end; 0 does not watch."""


class ModelConfig(Section):
    """The trained model."""

    hf: Path
    """Hugging Face folder: config.json, safetensors, tokenizer. Code in it is never run."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: list[Literal["core_attn", "layernorm", "mlp", "moe"]] = ["core_attn"]
    """What recompute = "selective" runs again in the backward pass."""
    fused_swiglu: bool | None = None
    """Keep three of five MLP activations, compute the others again for backward; None does so on GPUs."""
    moe_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts."""
    router_replay: bool = False
    """Send each token to the experts that its old log-probs saw, in all epochs of a batch."""
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


class DataConfig(Section):
    """Prompts and how they are rendered."""

    prompts: str | list[str]
    """JSON Lines ``{"id","problem","answer"}`` or DAPO-Math-17k's parquet columns; one file or several."""
    weights: list[PositiveFloat] = []
    """Share of each file in every batch; empty: every prompt once a pass, whatever its file."""
    template: str = "chat"
    """``chat`` (the tokenizer's), ``raw`` (the problem as it stands), or a Jinja file."""
    shuffle: bool = True
    conflicts: Literal["error", "drop"] = "error"
    """One prompt with two golds: stop, or drop every row of that prompt."""
    system_prompt: str = ""
    template_kwargs: dict[str, bool | int | str] = {}

    @property
    def files(self) -> list[str]:
        """Prompt files."""
        return [self.prompts] if isinstance(self.prompts, str) else self.prompts

    @model_validator(mode="after")
    def _every_file_has_a_weight(self) -> Self:
        if not self.files or (self.weights and len(self.weights) != len(self.files)):
            raise ValueError(
                f"data.prompts names {len(self.files)} files and data.weights {len(self.weights)} weights; "
                "give at least one file, and one weight a file or none"
            )
        return self


class RolloutConfig(Section):
    """One rollout batch and the engine that samples it."""

    prompts: PositiveInt = 256
    group_size: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    top_p: float = 1.0
    max_prompt_tokens: PositiveInt = 1024
    max_response_tokens: PositiveInt = 15360
    min_tokens: NonNegativeInt = 0
    engine: Literal["vllm", "server"] = "vllm"
    """A child process of rank 0, or the servers that `pnpo-megatron serve` started."""
    servers: list[Annotated[str, Field(pattern=r"^http://[^/\s]+:\d+$")]] = []
    """``http://HOST:PORT`` of each, for engine = "server"."""
    colocated: bool = False
    """GPUs only: the engine sleeps during updates, gradients and optimizer leave the GPU meanwhile."""
    replay: str = ""
    """Train on the stored rollouts of this run folder instead of sampling."""
    kv_cache_bytes: PositiveInt | None = None
    """Key-value cache of the engine; None takes 256 MiB on CPU, and the engine's own rule on GPUs."""
    max_num_seqs: PositiveInt = 256
    enforce_eager: bool | None = None
    """None: eager on CPU, graphs on GPUs."""
    threads: PositiveInt = 1
    """CPU threads of the engine."""
    keep: NonNegativeInt = 3
    """Binary rollout files kept, 0 for all; the JSON Lines are always kept."""
    stop: list[str] = []
    """Further tokens that end a response, beside those of generation_config.json."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by other prompts' (DAPO)."""
    max_refills: NonNegativeInt = 3
    """Rounds of other prompts in place of failed or dropped ones; then dropped groups fill the batch."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Truncated responses: train them, leave them out of the loss, or DAPO's soft penalty on the reward."""
    overlong_buffer: PositiveInt = 4096
    """Tokens before the limit over which the penalty grows."""
    overlong_penalty: PositiveFloat = 1.0
    """The penalty at the limit."""
    correction: Literal["none", "token", "sequence"] = "none"
    """Multiply the loss by learner / engine of the sampled token, or of the whole response, truncated."""
    correction_cap: float = Field(2.0, gt=1.0)
    correction_mask: bool = False
    """Leave out tokens (or responses) whose correction lies outside 1/cap..cap, instead of truncating."""
    max_lag: int = Field(0, ge=0, le=1)
    """1: generate the next batch during the update, with weights that are one batch older."""
    max_mismatch: PositiveFloat = 0.5
    """Nats a token between learner and engine, on the same weights, above which the run stops."""
    sync_check: PositiveInt = 4
    """Prompts sampled after every sync to compare learner and engine."""
    start_timeout_s: PositiveFloat = 900.0
    generate_timeout_s: PositiveFloat = 7200.0
    sync_timeout_s: PositiveFloat = 600.0
    restarts: NonNegativeInt = 2
    """Times that a dead engine is started again within one call, with the same weights, prompts and seeds."""

    @model_validator(mode="after")
    def _training_samples_the_whole_distribution(self) -> Self:
        if self.top_p != 1.0:
            raise ValueError(
                f"rollout.top_p = {self.top_p}: ratios are taken against the untruncated policy, so "
                "training needs 1.0; eval.top_p is free"
            )
        return self

    @model_validator(mode="after")
    def _servers_are_named(self) -> Self:
        if (self.engine == "server") != bool(self.servers) or len(set(self.servers)) < len(self.servers):
            raise ValueError(
                f'rollout.servers = {self.servers} with rollout.engine = "{self.engine}"; give each address '
                'once with engine = "server", and none with "vllm"'
            )
        return self

    @model_validator(mode="after")
    def _the_penalty_fits_the_length(self) -> Self:
        if self.overlong == "penalty" and self.overlong_buffer > self.max_response_tokens:
            raise ValueError(
                f"rollout.overlong_buffer = {self.overlong_buffer} exceeds rollout.max_response_tokens = "
                f"{self.max_response_tokens}; use about a quarter of it, {self.max_response_tokens // 4 or 1}"
            )
        return self


class RewardConfig(Section):
    """A reward is a plain function of one response."""

    function: str = "math"
    """``math`` or ``module:function``, taking a RewardInput and returning a float."""
    workers: PositiveInt = 2
    timeout_s: PositiveFloat = 10.0
    memory_bytes: NonNegativeInt = 4 << 30
    """Address space of a grader process; 0, which a function on a GPU needs, sets no limit."""
    max_fault_rate: float = Field(0.01, ge=0.0, le=1.0)
    permute: bool = False
    """Control experiment: shuffle the rewards inside every group, so that they teach nothing but format."""


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


class EvalConfig(Section):
    """Avg@k on benchmark files, before training, every N steps and at the end."""

    every: NonNegativeInt = 10
    samples: PositiveInt = 32
    temperature: NonNegativeFloat = 0.7
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    max_response_tokens: PositiveInt | None = None
    benchmarks: list[str] = []


class CheckpointConfig(Section):
    """Resumable checkpoints."""

    every: NonNegativeInt = 10
    """Rollout batches between two checkpoints; the last one and a stop by a signal save in any case."""
    within_batch: NonNegativeInt = 0
    """Updates between two checkpoints inside a rollout batch; 0 (or false) saves only between batches."""
    keep: PositiveInt = 3
    """Newest checkpoints kept, beside the best by evaluation and the newest that every layout loads."""
    portable_every: NonNegativeInt = 50
    """Rollout batches between checkpoints that load under any layout (the last one always does)."""
    asynchronous: bool = True
    """Write while training goes on."""
    on_failure: Literal["stop", "go_on"] = "stop"
    """When a checkpoint cannot be written, e.g. because the disk is full."""


class ExportConfig(Section):
    """Hugging Face folders written during training; the last step is always exported."""

    every: NonNegativeInt = 0


class Config(BaseSettings):
    """Everything a run depends on."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    seed: NonNegativeInt = 42
    steps: PositiveInt = 150
    """Rollout batches."""
    run: RunConfig = RunConfig()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batching: BatchingConfig = BatchingConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _groups_fill_every_update(self) -> Self:
        prompts, groups = self.rollout.prompts, self.objective.mini_batch
        if prompts % groups:
            raise ValueError(
                f"rollout.prompts = {prompts} does not split into updates of "
                f"objective.mini_batch = {groups} groups; "
                f"use {max(prompts - prompts % groups, groups)} prompts, "
                f"or a mini_batch that divides {prompts}"
            )
        return self

    @model_validator(mode="after")
    def _old_logprobs_are_of_the_policy_that_sampled(self) -> Self:
        rollout, source = self.rollout, self.objective.old_logprobs
        if rollout.max_lag and source == "learner":
            raise ValueError(
                f'rollout.max_lag = {rollout.max_lag} needs objective.old_logprobs = "rollout": the learner '
                "has moved on since the batch was sampled, and ratios that begin at 1 would hide that"
            )
        if rollout.correction != "none" and source == "rollout":
            raise ValueError(
                f'rollout.correction = "{rollout.correction}" is the ratio of objective.old_logprobs = '
                '"learner" to the engine\'s; with "rollout" it is 1 everywhere: set correction = "none"'
            )
        if rollout.max_lag and rollout.replay:
            raise ValueError("rollout.max_lag: nothing is sampled with rollout.replay; use max_lag = 0")
        return self

    @model_validator(mode="after")
    def _a_shared_gpu_has_one_tenant_at_a_time(self) -> Self:
        rollout = self.rollout
        found = {
            'rollout.engine = "server"': rollout.engine != "vllm",
            "rollout.max_lag = 1": rollout.max_lag,
            "rollout.replay": rollout.replay,
            "optimizer.offload": self.optimizer.offload,
        }
        if rollout.colocated and any(found.values()):
            raise ValueError(
                f"rollout.colocated = true and {next(name for name in found if found[name])}: learner and "
                "engine take turns on a GPU that both of them fill; use one of the two"
            )
        return self

    @model_validator(mode="after")
    def _a_sequence_fits_a_micro_batch(self) -> Self:
        multiple = 2 * self.parallel.context * self.parallel.tensor
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        needed = -(-longest // multiple) * multiple // self.parallel.context
        if needed > self.batching.max_tokens:
            raise ValueError(
                f"batching.max_tokens = {self.batching.max_tokens} cannot hold one prompt and response of "
                f"{longest} tokens over {self.parallel.context} context-parallel ranks; use {needed} or more"
            )
        return self

    @model_validator(mode="after")
    def _routes_can_be_replayed(self) -> Self:
        if not self.model.router_replay:
            return self
        problems = {
            "objective.old_logprobs": self.objective.old_logprobs == "learner" or "learner",
            "checkpoint.within_batch": self.checkpoint.within_batch == 0 or 0,
            "model.recompute": self.model.recompute != "full" or self.parallel.pipeline == 1 or "selective",
        }
        for key, works in problems.items():
            if works is not True:
                section, _, name = key.partition(".")
                raise ValueError(
                    f"{key} = {getattr(getattr(self, section), name)!r} with model.router_replay = true: "
                    f"routes are kept in memory from scoring to the last epoch; use {works!r}"
                )
        return self

    def flat(self) -> dict[str, Any]:
        """``section.key`` to value, JSON values only."""
        values: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            section = getattr(self, name)
            values |= (
                {f"{name}.{k}": v for k, v in value.items()}
                if isinstance(section, Section)
                else {name: value}
            )
        return values

    def to_toml(self) -> str:
        """The resolved settings, loadable again."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def load_config(path: str | Path, overrides: Sequence[str] = (), *, without: Collection[str] = ()) -> Config:
    """Read a TOML file, leaving out the ``section.key`` in `without`, and ``--section.key=value`` overrides.

    Raises:
        ConfigError: one line with the key, what was found and what would work.
    """
    if not Path(path).is_file():
        raise ConfigError(
            f"{path}: no such file; give the path of a TOML configuration, e.g. "
            "examples/arithmetic_cpu/config.toml"
        )

    try:
        flags = CliSettingsSource[Any](Config, cli_parse_args=list(overrides), cli_exit_on_error=False)
        table = TomlConfigSettingsSource(Config, path)()
        for section, _, key in (one.partition(".") for one in without):
            table.get(section, {}).pop(key, None)
        return Config.model_validate(_merged(table, flags()))
    except TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except SettingsError as error:
        raise ConfigError(_flag_message(str(error))) from error
    except ValidationError as error:
        raise ConfigError("; ".join(_message(detail) for detail in error.errors())) from error


def known_keys() -> dict[str, Any]:
    """Every ``section.key`` with its default; `...` for the required ones."""
    keys: dict[str, Any] = {}
    for name, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            for key, field in info.annotation.model_fields.items():
                keys[f"{name}.{key}"] = ... if field.is_required() else field.default
        else:
            keys[name] = info.default
    return keys


def _message(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key)
    if detail["type"] == "missing":
        return f"{key}: missing; set it in the file or with --{key}=VALUE"
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    default = known_keys().get(".".join(str(part) for part in detail["loc"][:2]))
    works = "" if default in (..., None, "", []) else f"; {default} works"
    return f"{key} = {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}{works}"


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(Config.model_fields)}"
    return f"{key}: unknown setting; {hint}"


def _flag_message(text: str) -> str:
    unknown = text.rpartition("unrecognized arguments: ")[2].split()
    if "unrecognized arguments" in text and unknown:
        key = unknown[0].lstrip("-").partition("=")[0]
        return (
            _unknown_key(key)
            if unknown[0].startswith("--")
            else f"{unknown[0]}: expected --section.key=value"
        )
    return text


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested tables joined; where both have a value, `over` wins."""
    joined = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(joined.get(key), dict)
        joined[key] = _merged(joined[key], value) if both else value
    return joined


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: an absent key means the default, which is None wherever None is allowed."""
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }
