"""What an engine is built with, and what its sampler is held to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

BATCHED_TOKENS = 4096
"""Of one engine step, at least."""


@dataclass(frozen=True)
class EngineSettings:
    """An engine, the same in a child process and behind a server."""

    model_folder: str
    """HF folder with config.json and safetensors files."""
    dtype: str
    """E.g. "float32" or "bfloat16"."""
    max_model_len: int
    """Prompt and response tokens of one sequence."""
    kv_cache_memory_bytes: int
    max_num_seqs: int = 256
    """Sequences generated side by side."""
    enforce_eager: bool = True
    """No graph capture; keep it on CPUs."""
    device: Literal["cpu", "cuda"] = "cpu"
    sleep_mode: bool = False
    """The engine can give its memory back (`Sleep`); GPUs only."""
    routes: bool = False
    """Return the experts that every token was sent to."""

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's EngineArgs; ``generation_config="vllm"`` keeps the folder's defaults out."""
        on_gpu = self.device == "cuda"
        return {
            "model": self.model_folder,
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "max_num_seqs": self.max_num_seqs,
            # Room for the longest whole prompt beside every running sequence: without chunks it would wait.
            "max_num_batched_tokens": max(BATCHED_TOKENS, self.max_model_len + self.max_num_seqs),
            # After part of a prefill vLLM rewinds a seeded request's generator, which a CPU generator cannot
            # do: the engine would die as soon as the prompts of a call exceed max_num_batched_tokens.
            "enable_chunked_prefill": on_gpu,
            "enforce_eager": self.enforce_eager,
            "enable_sleep_mode": self.sleep_mode,
            "enable_prefix_caching": True,
            # The CPU default of 128 shares nothing of the prompts of a group that are shorter.
            **({} if on_gpu else {"block_size": 32}),
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "enable_return_routed_experts": self.routes,
            # Hidden states and head are multiplied in float32 (GPU.md 6); the CPU build packs the head and
            # cannot cast it.
            "hf_overrides": {"head_dtype": "float32"} if on_gpu else {},
        }


@dataclass(frozen=True)
class SamplerSettings:
    """The sampler's side of an engine."""

    engine: EngineSettings
    """Servers have it like this, or with more room."""
    decode: Callable[[Sequence[int]], str]
    """Response ids to text, for rewards and people."""
    initial_version: int | None = None
    """Version of the folder's own weights; None refuses generation until a sync."""
    start_timeout_s: float = 600.0
    generate_timeout_s: float = 3600.0
    sync_timeout_s: float = 600.0
    restarts: int = 2
    """Times that a child process which dies is started again within one call."""
    stream: bool = False
    """Weights go from GPU to GPU, in buckets, and not through host memory; no restarts then."""
