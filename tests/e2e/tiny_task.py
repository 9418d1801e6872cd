"""A model folder, prompts and a config for whole runs that last seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789+="]
STEPS, EPOCHS, UPDATES_PER_EPOCH = 3, 2, 2
CONFIG = """
seed = 11
steps = {steps}
[run]
folder = "{folder}"
timeout_s = 120
[model]
hf = "{task}/model"
dtype = "float32"
[data]
prompts = "{task}/prompts.jsonl"
template = "raw"
[rollout]
prompts = 4
group_size = 4
max_prompt_tokens = 8
max_response_tokens = 12
keep = 0
kv_cache_bytes = 16777216
max_mismatch = 1e-4
[reward]
function = "even_reward:even_digits"
workers = 1
[objective]
epochs = 2
mini_batch = 2
gate_low = 0.2
gate_high = 0.3
[optimizer]
lr = 2e-3
warmup_steps = 2
[batching]
max_tokens = 64
[eval]
every = 1
samples = 2
benchmarks = ["{task}/problems.jsonl"]
[checkpoint]
every = 1
[export]
every = 1
"""


SHAPE = {
    "vocab_size": len(SYMBOLS), "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False, "head_dim": 32}
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {**EXPERTS, "num_local_experts": 4, "sliding_window": None},
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
}


def make_task(folder: Path, family: str = "qwen2") -> Path:
    """Write model, prompts and problems."""
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    torch.manual_seed(5)
    config_class, model_class, changes = FAMILIES[family]
    model = model_class(config_class(**{**SHAPE, **changes}))
    model.save_pretrained(folder / "model")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder / "model")
    for name, start in (("prompts", 0), ("problems", 50)):
        rows = [
            {"id": f"{name}-{i}", "problem": f"{start + i}+{i}=", "answer": str(start + 2 * i)}
            for i in range(10)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_config(task: Path, run_folder: Path, steps: int = STEPS) -> Path:
    path = run_folder.with_suffix(".toml")
    path.write_text(CONFIG.format(task=task, folder=run_folder, steps=steps))
    return path


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), str(ROOT)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start_training(config: Path, *flags: str, ranks: int = 1) -> subprocess.Popen[str]:
    """`pnpo-megatron train`, under torchrun if there is more than one rank."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    command = [sys.executable, *launcher, "-m", "pnpo_megatron", "train", str(config), *flags]
    return subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 240.0) -> tuple[int, str]:
    """Exit code and output; a process that outlives its time is killed and fails the test."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{output}") from None
    return process.returncode, output


def stop_after_step(
    process: subprocess.Popen[str], run_folder: Path, step: int, timeout_s: float = 240.0
) -> None:
    """Send SIGTERM as soon as metrics.jsonl holds an update of `step`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if any(row.get("step") == step and row["kind"] == "update" for row in read_metrics(run_folder)):
            process.send_signal(signal.SIGTERM)
            return
        time.sleep(0.05)
    output = finish(process, 5.0)[1] if process.poll() is not None else ""
    raise AssertionError(f"no update of step {step} within {timeout_s} s\n{output}")


def read_metrics(run_folder: Path) -> list[dict[str, object]]:
    """Complete rows written so far."""
    path = run_folder / "metrics.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def without_times(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """What two runs of one seed must agree on (DECISIONS: Metrics and files)."""
    dropped = ("time/", "tokens/per_second", "memory/")
    return [{key: value for key, value in row.items() if not key.startswith(dropped)} for row in rows]
