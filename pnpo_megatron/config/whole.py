"""All settings of a run, and the checks that take more than one section."""

from typing import Any, Self

import tomli_w
from pydantic import NonNegativeInt, PositiveInt, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pnpo_megatron.config.learner import (
    BatchingConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
)
from pnpo_megatron.config.rollouts import DataConfig, EvalConfig, RewardConfig, RolloutConfig
from pnpo_megatron.config.run import CheckpointConfig, ExportConfig, RunConfig, Section, TrackConfig


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
    track: TrackConfig = TrackConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _groups_fill_every_update(self) -> Self:
        prompts, groups = self.rollout.prompts, self.objective.mini_batch
        if prompts % groups:
            raise ValueError(
                f"rollout.prompts = {prompts} does not split into updates of objective.mini_batch = {groups} "
                f"groups; use {max(prompts - prompts % groups, groups)} prompts, or a mini_batch that "
                f"divides {prompts}"
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
    def _what_is_scored_early_is_scored_once(self) -> Self:
        rollout = self.rollout
        found = {
            'objective.old_logprobs = "rollout"': self.objective.old_logprobs == "rollout",
            "rollout.colocated = true": rollout.colocated,
            "rollout.replay": rollout.replay,
            "model.router_replay": self.model.router_replay,
        }
        if rollout.overlap_logprobs and any(found.values()):
            raise ValueError(
                f"rollout.overlap_logprobs = true and {next(name for name in found if found[name])}: the "
                "learner scores groups while others are sampled on other devices; use one of the two"
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
    def _an_evaluation_knows_right_from_wrong(self) -> Self:
        if self.eval.benchmarks and not isinstance(self.reward.function, str):
            raise ValueError(
                f"eval.benchmarks with {len(self.reward.function)} functions in reward.function: a weighted "
                "sum does not say right or wrong; use eval.benchmarks = [], and `pnpo-megatron eval` later"
            )
        return self

    @model_validator(mode="after")
    def _routes_can_be_replayed(self) -> Self:
        if not self.model.router_replay:
            return self
        sampled = self.model.router_replay == "rollout"  # such routes are part of the batch
        alone = self.parallel.pipeline == 1
        recomputed = self.model.recompute_modules if self.model.recompute == "selective" else []
        problems = {
            "objective.old_logprobs": sampled or self.objective.old_logprobs == "learner" or "learner",
            "checkpoint.within_batch": sampled or self.checkpoint.within_batch == 0 or 0,
            "model.recompute": self.model.recompute != "full" or alone or "selective",
            "model.recompute_modules": "moe" not in recomputed or alone or ["core_attn"],
        }
        for key, works in problems.items():
            if works is not True:
                section, _, name = key.partition(".")
                raise ValueError(
                    f"{key} = {getattr(getattr(self, section), name)!r} with model.router_replay: old routes "
                    f"live in memory from scoring to the last epoch, for one pass at a time; use {works!r}"
                )
        return self

    def flat(self) -> dict[str, Any]:
        """``section.key`` to value, JSON values only."""
        values: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            section = isinstance(value, dict)
            values |= {f"{name}.{key}": one for key, one in value.items()} if section else {name: value}
        return values

    def to_toml(self) -> str:
        """The resolved settings, loadable again. TOML has no null: what is None is None by default too."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


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
