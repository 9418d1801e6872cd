"""Settings of what a batch is made of: prompts, responses, rewards; and of evaluations."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pnpo_megatron.config.run import Section

CPU_CACHE_BYTES, GPU_CACHE_BYTES = 256 * 2**20, 16 * 2**30
"""Key-value cache of an engine where none is set."""


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


SERVER_ADDRESS = r"^http://[^/\s]+:\d+$"


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
    servers: list[Annotated[str, Field(pattern=SERVER_ADDRESS)]] = []
    """``http://HOST:PORT`` of each, for engine = "server"."""
    weight_transfer: Literal["auto", "ipc", "nccl"] = "auto"
    """auto: host memory, TCP to other hosts. From GPU to GPU: ipc to a child process, nccl to servers."""
    colocated: bool = False
    """GPUs only: the engine sleeps during updates, gradients and optimizer leave the GPU meanwhile."""
    replay: str = ""
    """Train on the stored rollouts of this run folder instead of sampling."""
    kv_cache_bytes: PositiveInt | None = None
    """Key-value cache of the engine; None takes `CPU_CACHE_BYTES` or `GPU_CACHE_BYTES`."""
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
    overlap_logprobs: bool = False
    """Score finished groups while others are sampled on other devices; weights begin at 1 within rounding."""
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

    function: str | dict[str, float] = "math"
    """``math`` or ``module:function``, taking a RewardInput and returning a float. Or several = weight."""
    workers: PositiveInt = 2
    timeout_s: PositiveFloat = 10.0
    memory_bytes: NonNegativeInt = 4 << 30
    """Address space of a grader process; 0, which a function on a GPU needs, sets no limit."""
    max_fault_rate: float = Field(0.01, ge=0.0, le=1.0)
    permute: bool = False
    """Control experiment: shuffle the rewards inside every group, so that they teach nothing but format."""


class EvalConfig(Section):
    """Avg@k on benchmark files, before training, every N steps and at the end."""

    every: NonNegativeInt = 10
    samples: PositiveInt = 32
    temperature: NonNegativeFloat = 0.7
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    max_response_tokens: PositiveInt | None = None
    benchmarks: list[str] = []
