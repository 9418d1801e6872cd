"""Tokens per second of the sampler, of raw ``vllm.LLM.generate`` and of transformers' ``generate``.

    OMP_NUM_THREADS=1 python bench/rollout_throughput.py [--rounds 2] [--model HF_FOLDER --stop 30,28]

All have the same model, prompts and stop set. Without --model a random Qwen2 is used. Rounds alternate
between them, so that other load on the machine hits all, and the best round of each counts. CPU seconds (of
trainer and worker together) are printed beside wall seconds: on a busy machine only they mean something.
transformers gets one batch of all responses and runs until the longest ends.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import Bound, Row, options, report

from pnpo_megatron.rollout.requests import make_request
from pnpo_megatron.rollout.settings import EngineSettings, SamplerSettings
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.rollout.vllm_worker import sampling_params
from pnpo_megatron.types import Prompt, Sampling

GROUP = 8
CONTEXT = 384
CACHE_BYTES = 256 * 2**20
SEED = ("bench",)
STOP = tuple(range(8))
"""8 of the random model's 512 tokens: mixed lengths of about 60 tokens on average."""


def random_model(folder: Path) -> Path:
    """A Qwen2 of 4 layers x 128 with 512 tokens."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def engine_of(folder: Path) -> EngineSettings:
    """The same for both."""
    return EngineSettings(str(folder), "float32", max_model_len=CONTEXT, kv_cache_memory_bytes=CACHE_BYTES)


class RawEngine:
    """``vllm.LLM`` in this process with the sampler's own engine and sampling arguments."""

    def __init__(self, folder: Path, sampling: Sampling) -> None:
        self._sampling = sampling
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
        from vllm import LLM

        self._llm = LLM(**engine_of(folder).arguments())

    def run(self, prompts: list[Prompt]) -> int:
        """Generate for all prompts; response tokens."""
        inputs, params = [], []
        for index, prompt in enumerate(prompts):
            request = make_request(index, prompt, GROUP, SEED)
            inputs += [{"prompt_token_ids": request.ids.tolist()}] * GROUP
            params += [sampling_params(self._sampling, seed) for seed in request.seeds.tolist()]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class Transformers:
    """``generate`` of transformers, in this process."""

    def __init__(self, folder: Path, sampling: Sampling) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        self._sampling = sampling

    def run(self, prompts: list[Prompt]) -> int:
        """Generate for all prompts; response tokens, each up to its stop token."""
        import torch

        stop = torch.tensor(self._sampling.stop_token_ids)
        ids = torch.tensor([prompt.token_ids for prompt in prompts for _ in range(GROUP)])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=self._sampling.max_tokens,
            eos_token_id=stop.tolist(),
            pad_token_id=int(stop[0]),
        )
        before = torch.isin(output[:, ids.shape[1] :], stop).cumsum(1) == 0
        return int(before.sum() + (~before.all(1)).sum())


def run_sampler(sampler: VllmSampler, prompts: list[Prompt], sampling: Sampling) -> int:
    """Generate for all prompts, up to finished rollouts; response tokens."""
    groups = sampler.generate(prompts, GROUP, sampling, SEED)
    return sum(len(rollout.response_ids) for group in groups for rollout in group.rollouts)


def cpu_seconds(pid: int) -> float:
    """User and system time of another process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(run: Callable[[], int], worker: int) -> tuple[int, float, float]:
    """Tokens, wall seconds, CPU seconds of this process and the worker."""
    wall, cpu = time.monotonic(), time.process_time() + cpu_seconds(worker)
    tokens = run()
    return tokens, time.monotonic() - wall, time.process_time() + cpu_seconds(worker) - cpu


def main() -> None:
    """A line a round, a table of the best, and what is promised."""
    parser = options(__doc__, rounds=2)
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--stop", help="token ids at which a response of --model ends, with commas")
    args = parser.parse_args()
    stop = tuple(map(int, args.stop.split(","))) if args.stop else STOP
    sampling = Sampling(1.0, 256, stop_token_ids=stop)
    ids = [tuple(8 + (7 * i + j) % 500 for j in range(32)) for i in range(args.responses // GROUP)]
    prompts = [Prompt(f"p{i}", prompt, "") for i, prompt in enumerate(ids)]
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(Path(folder))
        settings = SamplerSettings(engine_of(model), str, initial_version=0)
        with VllmSampler(settings, log_path=Path(folder) / "worker.log") as sampler:
            raw, other = RawEngine(model, sampling), Transformers(model, sampling)
            sampler.wait_ready()
            runs = {
                "sampler": lambda: run_sampler(sampler, prompts, sampling),
                "raw vLLM": lambda: raw.run(prompts),
                "transformers": lambda: other.run(prompts),
            }
            rows = compare(runs, args.rounds, sampler.worker_pid)
    report("rollout_throughput", rows, bounds(rows), out=args.out)


def compare(runs: dict[str, Callable[[], int]], rounds: int, worker: int) -> list[Row]:
    """Alternate between the runs after one warm-up round; the best of each."""
    speeds: dict[str, list[tuple[float, float, int]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            tokens, wall, cpu = measure(run, worker)
            if number:
                speeds[name].append((tokens / wall, tokens / cpu, tokens))
                print(f"round {number} {name}: {tokens} tokens, {tokens / wall:.0f}/s", flush=True)
    return [
        {
            "engine": name,
            "response tokens": values[-1][2],
            "tokens/s": max(speed[0] for speed in values),
            "tokens/CPU s": max(speed[1] for speed in values),
        }
        for name, values in speeds.items()
    ]


def bounds(rows: list[Row]) -> list[Bound]:
    """The sampler gives at least 0.9 of raw vLLM and twice what transformers gives."""
    mine, raw, other = (row["tokens/s"] for row in rows)
    return [
        Bound("raw vLLM over the sampler, tokens/s", raw / mine, 1 / 0.9),
        Bound("transformers over the sampler, tokens/s", other / mine, 0.5),
    ]


if __name__ == "__main__":
    main()
