"""Turns settings and what was read (`inputs`) into live parts: processes, groups, the learner."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from pnpo_megatron.config import Config
from pnpo_megatron.convert.hf_folder import DTYPES
from pnpo_megatron.convert.stream import load_hf_weights
from pnpo_megatron.data.order import Mixture, PromptSource, make_source
from pnpo_megatron.inputs import Inputs, experts_settings
from pnpo_megatron.inputs import read_inputs as read_inputs
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.policy.checkpoint import load_checkpoint
from pnpo_megatron.policy.learner import LearnerSettings, MegatronLearner
from pnpo_megatron.policy.model import build_model
from pnpo_megatron.policy.offload import LearnerMemory
from pnpo_megatron.policy.optimizer import OptimizerSettings
from pnpo_megatron.policy.process_groups import initialize_parallel, make_deterministic, start_distributed
from pnpo_megatron.reward.pool import RewardPool
from pnpo_megatron.rollout.colocation import Turns
from pnpo_megatron.rollout.sampler import EngineSampler
from pnpo_megatron.rollout.server_sampler import ServerSampler
from pnpo_megatron.rollout.settings import SamplerSettings
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.serve import engine_settings


@dataclass(frozen=True)
class Live:
    """Running parts. `sampler` and `rewards` live on rank 0 only."""

    inputs: Inputs
    groups: ParallelGroups
    learner: MegatronLearner
    prompts: PromptSource | Mixture
    sampler: EngineSampler | None
    rewards: RewardPool | None
    turns: Turns | None = None
    """With rollout.colocated, on rank 0, whose GPU the engine shares."""
    memory: LearnerMemory | None = None

    @property
    def engine(self) -> EngineSampler:
        """The sampler."""
        assert self.sampler is not None, "only rank 0 samples, and not in a replay"
        return self.sampler

    @property
    def graders(self) -> RewardPool:
        """The rewards."""
        assert self.rewards is not None, "only rank 0 grades, and not in a replay"
        return self.rewards


@contextmanager
def rollout_parts(config: Config, inputs: Inputs) -> Iterator[tuple[EngineSampler, RewardPool]]:
    """Engine and graders, for rank 0."""
    with start_sampler(config, inputs) as sampler, start_rewards(config) as rewards:
        yield sampler, rewards


@contextmanager
def live_parts(
    config: Config, inputs: Inputs, running: tuple[EngineSampler, RewardPool] | None = None
) -> Iterator[Live]:
    """Start engine and graders on rank 0, build the learner on every rank, and end them all on the way out.

    The engine starts first: importing it takes seconds in which Megatron builds. Engine and graders that are
    `running` already outlive the call.
    """
    if config.run.deterministic and torch.cuda.is_available():
        make_deterministic()
    start_distributed(config.run.timeout_s)
    rank = torch.distributed.get_rank()
    with ExitStack() as stack:
        sampler, rewards = None, None
        if rank == 0 and not config.rollout.replay:
            sampler, rewards = running or stack.enter_context(rollout_parts(config, inputs))
        turns = _first_turn(sampler) if config.rollout.colocated else None
        groups = initialize_parallel(
            inputs.parallel,
            seed=config.seed,
            timeout_s=config.run.timeout_s,
            control_timeout_s=_longest_work_of_rank_zero(config),
        )
        learner = build_learner(config, inputs, groups)
        source = make_source(
            inputs.loaded, config.data.weights, seed=config.seed, shuffle=config.data.shuffle
        )
        memory = LearnerMemory(learner) if config.rollout.colocated else None
        yield Live(inputs, groups, learner, source, sampler, rewards, turns, memory)


def _first_turn(sampler: EngineSampler | None) -> Turns | None:
    """The engine builds itself on an empty GPU and sleeps; the other ranks wait in what comes next."""
    if sampler is None:
        return None
    assert isinstance(sampler, VllmSampler)
    turns = Turns(sampler)
    turns.begin()
    return turns


def _longest_work_of_rank_zero(config: Config) -> float:
    """Seconds; each part of that work has a shorter deadline of its own, and says which it is."""
    rollout = config.rollout
    starting = rollout.start_timeout_s + rollout.sync_timeout_s
    return config.run.timeout_s + starting + 8 * rollout.generate_timeout_s


def build_learner(config: Config, inputs: Inputs, groups: ParallelGroups) -> MegatronLearner:
    """Megatron's model with the folder's weights, its optimizer, and what turns batches into updates."""
    model, fused = config.model, config.model.fused_swiglu
    modules: dict[str, Any] = {"recompute_modules": model.recompute_modules}
    chunks = build_model(
        inputs.architecture,
        inputs.parallel,
        dtype=DTYPES[model.dtype],
        recompute=model.recompute,
        attention_backend=model.attention_backend,
        bias_activation_fusion=torch.cuda.is_available() if fused is None else fused,
        **(modules if model.recompute == "selective" else {}),
        **experts_settings(config, inputs.architecture),
        deterministic_mode=config.run.deterministic and torch.cuda.is_available(),
    )
    if model.init:
        load_checkpoint(model.init, chunks, None, groups)
    else:
        load_hf_weights(chunks, inputs.folder, groups)
    settings = config.optimizer.model_dump(exclude={"max_skipped"})
    return MegatronLearner(
        chunks,
        inputs.architecture,
        groups,
        OptimizerSettings(**settings, total_steps=config.steps),
        LearnerSettings(
            temperature=config.rollout.temperature,
            max_tokens=config.batching.max_tokens,
            padded=config.batching.layout == "padded",
            logprob_chunk=model.logprob_chunk,
            kl_coef=config.objective.kl_coef,
            entropy_coef=config.objective.entropy_coef,
            moe_bias_rate=model.moe_bias_rate,
            gradient_cosine=config.run.gradient_cosine and config.objective.epochs > 1,
        ),
    )


def start_sampler(config: Config, inputs: Inputs) -> EngineSampler:
    """The engine, starting in the background, or the servers."""
    rollout = config.rollout
    settings = SamplerSettings(
        replace(engine_settings(config), sleep_mode=rollout.colocated),
        decode=lambda ids: str(inputs.tokenizer.decode(ids, skip_special_tokens=True)),
        start_timeout_s=rollout.start_timeout_s,
        generate_timeout_s=rollout.generate_timeout_s,
        sync_timeout_s=rollout.sync_timeout_s,
        restarts=rollout.restarts,
        stream=rollout.weight_transfer != "auto",
    )
    if rollout.engine == "server":
        return ServerSampler(settings, rollout.servers)
    return VllmSampler(settings, log_path=config.run.folder / "engine.log", threads=rollout.threads)


def start_rewards(config: Config) -> RewardPool:
    """The grader processes."""
    return RewardPool(
        config.reward.function,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        memory_bytes=config.reward.memory_bytes or None,
    )
