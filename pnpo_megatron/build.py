"""Turns settings into live parts: first everything that can be wrong is read, then processes are started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pnpo_megatron.algorithm.objective import Objective
from pnpo_megatron.algorithm.presets import OBJECTIVE_KEYS, make_objective
from pnpo_megatron.config import Config
from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.stream import load_hf_weights
from pnpo_megatron.data.order import Mixture, PromptSource, make_source
from pnpo_megatron.data.prompts import LoadedPrompts, load_prompts
from pnpo_megatron.data.templates import load_tokenizer
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.eval.benchmarks import Benchmark, load_benchmark
from pnpo_megatron.eval.evaluate import check_request
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.parallel.settings import ParallelSettings, check_layout
from pnpo_megatron.policy.learner import LearnerSettings, MegatronLearner
from pnpo_megatron.policy.megatron_config import experts_overrides
from pnpo_megatron.policy.model import build_model
from pnpo_megatron.policy.offload import LearnerMemory
from pnpo_megatron.policy.optimizer import OptimizerSettings
from pnpo_megatron.policy.process_groups import initialize_parallel, make_deterministic, start_distributed
from pnpo_megatron.reward.pool import RewardPool
from pnpo_megatron.reward.worker import load_function
from pnpo_megatron.rollout.colocation import Turns
from pnpo_megatron.rollout.sampler import EngineSampler
from pnpo_megatron.rollout.server_sampler import ServerSampler
from pnpo_megatron.rollout.stop_tokens import read_stop_token_ids, stop_tokens
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.serve import engine_options
from pnpo_megatron.types import Prompt, Sampling

LOSS_KEYS = {"name", *OBJECTIVE_KEYS}
"""Settings of `objective` that make the loss; the others are of the loop."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Inputs:
    """Everything a run reads before it starts a process: a wrong one ends the run here, with exit code 2."""

    folder: HfFolder
    architecture: Architecture
    tokenizer: Any
    loaded: LoadedPrompts
    benchmarks: list[Benchmark]
    objective: Objective
    sampling: Sampling
    eval_sampling: Sampling

    @property
    def prompts(self) -> list[Prompt]:
        """Distinct training prompts, in file order."""
        return self.loaded.prompts


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


def read_inputs(config: Config) -> Inputs:
    """Read and check model folder, prompts and benchmarks.

    Raises:
        UserError: naming the setting, what was found and what works.
    """
    if config.rollout.colocated and not torch.cuda.is_available():
        raise ConfigError(
            "rollout.colocated = true: there is no CUDA device whose memory engine and learner could share; "
            "use false"
        )
    _check_weight_transfer(config)
    folder = _read_model(config)
    _check_reward(config.reward.function)
    tokenizer = load_tokenizer(folder.path)
    data, rollout = config.data, config.rollout
    form: dict[str, Any] = {
        "template": data.template,
        "max_prompt_tokens": rollout.max_prompt_tokens,
        "system_prompt": data.system_prompt,
        "template_kwargs": data.template_kwargs,
    }
    loaded = load_prompts(data.files, tokenizer, conflicts=data.conflicts, **form)
    if len(loaded.prompts) < rollout.prompts and not rollout.replay:
        raise ConfigError(
            f"rollout.prompts = {rollout.prompts}: data.prompts = {data.prompts} holds "
            f"{len(loaded.prompts)} usable prompts ({loaded.summary}); use {len(loaded.prompts)} or fewer"
        )
    benchmarks = [load_benchmark(path, tokenizer, **form) for path in config.eval.benchmarks]
    stop = read_stop_token_ids(folder.path, tokenizer.eos_token_id) + stop_tokens(rollout.stop, tokenizer)
    eval_sampling = Sampling(config.eval.temperature, _eval_tokens(config), config.eval.top_p, 0, stop)
    if benchmarks:
        check_request(benchmarks, config.eval.samples, eval_sampling)
    return Inputs(
        folder=folder,
        architecture=folder.architecture,
        tokenizer=tokenizer,
        loaded=loaded,
        benchmarks=benchmarks,
        objective=_objective(config),
        sampling=Sampling(rollout.temperature, rollout.max_response_tokens, 1.0, rollout.min_tokens, stop),
        eval_sampling=eval_sampling,
    )


def _check_weight_transfer(config: Config) -> None:
    way, engine = config.rollout.weight_transfer, config.rollout.engine
    if way == "auto":
        return
    needed = {"ipc": "vllm", "nccl": "server"}[way]
    if engine != needed or not torch.cuda.is_available():
        found = f'rollout.engine = "{engine}"' if engine != needed else "no CUDA device"
        raise ConfigError(
            f'rollout.weight_transfer = "{way}" goes from GPU to GPU with rollout.engine = "{needed}", and '
            f'there is {found}; use "auto"'
        )


def _read_model(config: Config) -> HfFolder:
    """The model folder, if it is whole, long enough, and fits the layout and the ranks."""
    if not config.model.hf.is_dir():
        raise ConfigError(
            f"model.hf = {config.model.hf}: no such folder; give a Hugging Face folder "
            "with config.json and safetensors"
        )
    folder = HfFolder(config.model.hf)
    positions = folder.architecture.max_positions
    longest = config.rollout.max_prompt_tokens + max(config.rollout.max_response_tokens, _eval_tokens(config))
    if longest > positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + max_response_tokens = {longest} exceeds the model's {positions} "
            f"positions; use a max_response_tokens of {positions - config.rollout.max_prompt_tokens} or less"
        )
    folder.check_complete()
    parallel = ParallelSettings(**config.parallel.model_dump())
    check_layout(folder.architecture, parallel)
    _experts(config, folder.architecture)
    parallel.data_size(int(os.environ.get("WORLD_SIZE", "1")))
    return folder


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
            ParallelSettings(**config.parallel.model_dump()),
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
    chunks = build_model(
        inputs.architecture,
        ParallelSettings(**config.parallel.model_dump()),
        dtype=DTYPES[config.model.dtype],
        recompute=config.model.recompute,
        attention_backend=config.model.attention_backend,
        **_memory_overrides(config),
        **_experts(config, inputs.architecture),
        deterministic_mode=config.run.deterministic and torch.cuda.is_available(),
    )
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
            logprob_chunk=config.model.logprob_chunk,
        ),
    )


def _experts(config: Config, arch: Architecture) -> dict[str, Any]:
    return experts_overrides(arch, aux_loss=config.model.moe_aux_loss, replay=config.model.router_replay)


def _memory_overrides(config: Config) -> dict[str, Any]:
    modules = {"recompute_modules": config.model.recompute_modules}
    fused = config.model.fused_swiglu
    return {
        "bias_activation_fusion": torch.cuda.is_available() if fused is None else fused,
        **(modules if config.model.recompute == "selective" else {}),
    }


def start_sampler(config: Config, inputs: Inputs) -> EngineSampler:
    """The engine, starting in the background, or the servers."""
    rollout, options = config.rollout, engine_options(config)
    common: dict[str, Any] = {
        "decode": lambda ids: str(inputs.tokenizer.decode(ids, skip_special_tokens=True)),
        "start_timeout_s": rollout.start_timeout_s,
        "generate_timeout_s": rollout.generate_timeout_s,
        "sync_timeout_s": rollout.sync_timeout_s,
        "stream": rollout.weight_transfer != "auto",
    }
    if rollout.engine == "server":
        limits = {key: options[key] for key in ("max_model_len", "max_num_seqs")}
        return ServerSampler(inputs.folder.path, rollout.servers, **limits, **common)
    return VllmSampler(
        inputs.folder.path,
        log_path=config.run.folder / "engine.log",
        device="cuda" if torch.cuda.is_available() else "cpu",
        threads=rollout.threads,
        restarts=rollout.restarts,
        sleep_mode=rollout.colocated,
        **options,
        **common,
    )


def start_rewards(config: Config) -> RewardPool:
    """The grader processes."""
    return RewardPool(
        config.reward.function,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        memory_bytes=config.reward.memory_bytes or None,
    )


def _check_reward(name: str) -> None:
    try:
        load_function(name)
    except ValueError as error:
        raise ConfigError(f"reward.function = {name!r}: {error}") from error


def _objective(config: Config) -> Objective:
    return make_objective(**config.objective.model_dump(include=LOSS_KEYS))


def _eval_tokens(config: Config) -> int:
    return config.eval.max_response_tokens or config.rollout.max_response_tokens
