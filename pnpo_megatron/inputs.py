"""Everything that a run reads before it starts a process: what can be wrong is found here, exit code 2."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from pnpo_megatron.algorithm.objective import Objective
from pnpo_megatron.algorithm.presets import OBJECTIVE_KEYS, make_objective
from pnpo_megatron.config import Config
from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.data.prompts import LoadedPrompts, load_prompts
from pnpo_megatron.data.templates import load_tokenizer
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.eval.benchmarks import Benchmark, load_benchmark
from pnpo_megatron.eval.evaluate import check_request
from pnpo_megatron.parallel.settings import ParallelSettings, check_layout
from pnpo_megatron.policy.checkpoint import ARCHITECTURE_FILE, check_architecture
from pnpo_megatron.policy.megatron_config import experts_overrides
from pnpo_megatron.reward.worker import load_function
from pnpo_megatron.rollout.stop_tokens import read_stop_token_ids, stop_tokens
from pnpo_megatron.tracking import check_tools
from pnpo_megatron.types import Sampling

LOSS_KEYS = {"name", *OBJECTIVE_KEYS}
"""Settings of `objective` that make the loss; the others are of the loop."""


@dataclass(frozen=True)
class Inputs:
    """Everything a run reads before it starts a process: a wrong one ends the run here, with exit code 2."""

    folder: HfFolder
    architecture: Architecture
    parallel: ParallelSettings
    tokenizer: Any
    loaded: LoadedPrompts
    benchmarks: list[Benchmark]
    objective: Objective
    sampling: Sampling
    eval_sampling: Sampling


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
    check_tools(config.track)
    parallel = ParallelSettings(**config.parallel.model_dump())
    folder = _read_model(config, parallel)
    functions = config.reward.function
    for name in [functions] if isinstance(functions, str) else functions:
        try:
            load_function(name)
        except ValueError as error:
            raise ConfigError(f"reward.function = {name!r}: {error}") from error
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
        parallel=parallel,
        tokenizer=tokenizer,
        loaded=loaded,
        benchmarks=benchmarks,
        objective=make_objective(**config.objective.model_dump(include=LOSS_KEYS)),
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


def _read_model(config: Config, parallel: ParallelSettings) -> HfFolder:
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
    if config.model.init:
        if not (config.model.init / ARCHITECTURE_FILE).is_file():
            raise ConfigError(
                f"model.init = {config.model.init}: no Megatron checkpoint; give one that a run saved or "
                "that tools/checkpoint_convert/hf_to_megatron.py wrote"
            )
        check_architecture(config.model.init, folder.architecture)
    check_layout(folder.architecture, parallel)
    experts_settings(config, folder.architecture)
    parallel.data_size(int(os.environ.get("WORLD_SIZE", "1")))
    return folder


def experts_settings(config: Config, arch: Architecture) -> dict[str, Any]:
    """Settings of a mixture of experts, as fields of Megatron's configuration; see `experts_overrides`."""
    replay = config.model.router_replay
    sampled_here = config.rollout.engine == "vllm" and not config.rollout.replay
    if replay == "rollout" and sampled_here and not torch.cuda.is_available():
        raise ConfigError(
            'model.router_replay = "rollout": without a CUDA device vLLM does not tell where it sent tokens; '
            "use true"
        )
    return experts_overrides(
        arch,
        aux_loss=config.model.moe_aux_loss,
        bias_rate=config.model.moe_bias_rate,
        replay=bool(replay),
        grouped=config.model.grouped_experts,
    )


def _eval_tokens(config: Config) -> int:
    return config.eval.max_response_tokens or config.rollout.max_response_tokens
