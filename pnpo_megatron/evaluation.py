"""`pnpo-megatron eval`: score a Hugging Face folder or a Megatron checkpoint on benchmark files."""

import json
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pnpo_megatron.config.rollouts import SERVER_ADDRESS
from pnpo_megatron.convert.families import hf_shapes
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.data.templates import load_tokenizer
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.eval.benchmarks import Benchmark, load_benchmark
from pnpo_megatron.eval.evaluate import check_request, evaluate
from pnpo_megatron.eval.overlap import in_dapo_math_17k, warning
from pnpo_megatron.eval.progress import Progress, changed, folder_digest, problems_digest
from pnpo_megatron.eval.results import EvalResult, print_table
from pnpo_megatron.reward.pool import RewardPool
from pnpo_megatron.rollout.sampler import EngineSampler
from pnpo_megatron.rollout.server_sampler import ServerSampler
from pnpo_megatron.rollout.settings import EngineSettings, SamplerSettings
from pnpo_megatron.rollout.stop_tokens import read_stop_token_ids
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.serve import default_cache_bytes
from pnpo_megatron.types import Sampling

RESULT = "step_000000.json"


def run_evaluation(arguments: Namespace) -> None:
    """Print a table, and write scores and samples to the folder `arguments.out`.

    A killed evaluation goes on where it stopped; one that is complete is only shown.

    Raises:
        UserError: model, benchmark or sampling setting that cannot be used.
    """
    out = arguments.out or Path("runs") / "eval" / arguments.model.resolve().name
    if not arguments.model.is_dir():
        raise ConfigError(
            f"--model {arguments.model}: no such folder; give a Hugging Face folder or a Megatron checkpoint"
        )
    with _hf_folder(arguments.model, out) as folder:
        result = _evaluate(arguments, folder, out)
    print_table(result)
    print(f"scores: {out / RESULT}   samples: {(out / RESULT).with_suffix('.jsonl')}")


def _evaluate(arguments: Namespace, folder: HfFolder, out: Path) -> dict[str, Any]:
    """The scores, as their file has them."""
    tokenizer = load_tokenizer(folder.path)
    benchmarks = [
        load_benchmark(
            path, tokenizer, template=arguments.template, max_prompt_tokens=arguments.max_prompt_tokens
        )
        for path in arguments.benchmark
    ]
    overlap = {one.name: ids for one in benchmarks if (ids := in_dapo_math_17k(one))}
    for benchmark in benchmarks:
        if benchmark.name in overlap:
            print(warning(benchmark, overlap[benchmark.name], "DAPO-Math-17k"))
    sampling = Sampling(
        arguments.temperature,
        arguments.max_response_tokens,
        arguments.top_p,
        stop_token_ids=read_stop_token_ids(folder.path, tokenizer.eos_token_id),
    )
    check_request(benchmarks, arguments.samples, sampling)
    request = {
        "weights": folder_digest(arguments.model),
        "benchmarks": {one.name: problems_digest(one) for one in benchmarks},
        "samples": arguments.samples,
        "sampling": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(sampling).items()},
        "seed": arguments.seed,
        "dtype": arguments.dtype,
        "reward": arguments.reward,
    }
    complete = None if arguments.overwrite else _complete(out / RESULT, request)
    if complete is not None:
        print(f"{out / RESULT}: complete, nothing to sample")
        return complete
    progress = Progress(out / "step_000000.responses.jsonl", request, restart=arguments.overwrite)
    if len(progress):
        print(f"going on: the responses to {len(progress)} problems are there")
    result = _sample(arguments, folder, out, benchmarks, sampling, progress)
    result.write(out, 0, model=str(arguments.model), request=request, in_dapo_math_17k=overlap)
    progress.finish()
    return result.to_json()


def _complete(path: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The result that is there, if it answers this request."""
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if (old := found.get("request", {})) != request:
        raise ConfigError(
            f"{path} holds scores of {changed(old, request)}; choose another --out, or pass --overwrite"
        )
    return found


def _sample(
    arguments: Namespace,
    folder: HfFolder,
    out: Path,
    benchmarks: list[Benchmark],
    sampling: Sampling,
    progress: Progress,
) -> EvalResult:
    tokenizer = load_tokenizer(folder.path)
    longest = arguments.max_prompt_tokens + arguments.max_response_tokens
    if longest > folder.architecture.max_positions:
        raise ConfigError(
            f"--max-prompt-tokens + --max-response-tokens = {longest} exceeds the model's "
            f"{folder.architecture.max_positions} positions; use less"
        )
    on_gpu, servers = torch.cuda.is_available(), _servers(arguments.servers)
    engine = EngineSettings(
        str(folder.path),
        arguments.dtype,
        max_model_len=longest,
        kv_cache_memory_bytes=arguments.kv_cache_bytes or default_cache_bytes(),
        enforce_eager=not on_gpu,
        device="cuda" if on_gpu else "cpu",
    )
    settings = SamplerSettings(
        engine,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        initial_version=None if servers else 0,
    )
    sampler: EngineSampler = (
        ServerSampler(settings, servers) if servers else VllmSampler(settings, log_path=out / "engine.log")
    )
    with sampler, RewardPool(arguments.reward) as rewards:
        if servers:  # whatever they hold; the architecture must be theirs
            names = hf_shapes(folder.architecture)
            sampler.load_weights(((name, folder.tensor(name)) for name in names), version=0)
        return evaluate(
            sampler,
            benchmarks,
            samples=arguments.samples,
            sampling=sampling,
            grade=rewards.start,
            seed=arguments.seed,
            progress=progress,
        )


def _servers(words: str | None) -> list[str]:
    servers = words.split(",") if words else []
    if wrong := [one for one in servers if not re.match(SERVER_ADDRESS, one)]:
        raise ConfigError(f"--servers {wrong[0]}: expected http://HOST:PORT, several with commas")
    return servers


@contextmanager
def _hf_folder(model: Path, out: Path) -> Iterator[HfFolder]:
    """The folder itself, or a Megatron checkpoint converted to a folder that lives as long as the block."""
    if (model / "config.json").is_file():
        folder = HfFolder(model)
        folder.check_complete()
        yield folder
        return
    from pnpo_megatron.policy.conversion import megatron_to_hf, plan_megatron_to_hf

    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="hf-", dir=out) as temporary:
        target = Path(temporary) / "model"
        plan = plan_megatron_to_hf(model, target, None, overwrite=False)
        print(f"converting {model} for the engine")
        megatron_to_hf(plan, model, overwrite=False)
        yield HfFolder(target)
