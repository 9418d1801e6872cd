"""`pnpo-megatron eval`: score a Hugging Face folder on benchmark files."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from pnpo_megatron.build import default_cache_bytes
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.data.templates import load_tokenizer
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.eval.benchmarks import load_benchmark
from pnpo_megatron.eval.evaluate import check_request, evaluate
from pnpo_megatron.reward.pool import RewardPool
from pnpo_megatron.rollout.stop_tokens import read_stop_token_ids
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.types import Sampling


def run_evaluation(arguments: Namespace) -> None:
    """Print a table, and write scores and samples to the folder `arguments.out`.

    Raises:
        UserError: model, benchmark or sampling setting that cannot be used.
    """
    if not arguments.model.is_dir():
        raise ConfigError(
            f"--model {arguments.model}: no such folder; give a Hugging Face folder with weights"
        )
    folder, tokenizer = HfFolder(arguments.model), load_tokenizer(arguments.model)
    folder.check_complete()
    benchmarks = [
        load_benchmark(
            path, tokenizer, template=arguments.template, max_prompt_tokens=arguments.max_prompt_tokens
        )
        for path in arguments.benchmark
    ]
    stop = read_stop_token_ids(folder.path, tokenizer.eos_token_id)
    sampling = Sampling(
        arguments.temperature, arguments.max_response_tokens, arguments.top_p, stop_token_ids=stop
    )
    check_request(benchmarks, arguments.samples, sampling)
    longest = arguments.max_prompt_tokens + arguments.max_response_tokens
    if longest > folder.architecture.max_positions:
        raise ConfigError(
            f"--max-prompt-tokens + --max-response-tokens = {longest} exceeds the model's "
            f"{folder.architecture.max_positions} positions; use less"
        )
    out = arguments.out or Path("runs") / "eval" / arguments.model.resolve().name
    out.mkdir(parents=True, exist_ok=True)
    sampler = VllmSampler(
        folder.path,
        dtype=arguments.dtype,
        max_model_len=longest,
        kv_cache_memory_bytes=arguments.kv_cache_bytes or default_cache_bytes(),
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        log_path=out / "engine.log",
        enforce_eager=not torch.cuda.is_available(),
        device="cuda" if torch.cuda.is_available() else "cpu",
        initial_version=0,
    )
    with sampler, RewardPool(arguments.reward) as rewards:
        result = evaluate(
            sampler,
            benchmarks,
            samples=arguments.samples,
            sampling=sampling,
            grade=rewards.start,
            seed=arguments.seed,
        )
    path = result.write(out, 0, model=str(arguments.model), temperature=arguments.temperature)
    result.print_table()
    print(f"scores: {path}   samples: {path.with_suffix('.jsonl')}")
