"""What a GPU run rests on, with numbers: `scripts/gpu_check.sh` runs it and keeps them as JSON.

One GPU, torch, transformers and megatron-core; no TransformerEngine, no vLLM, no second rank.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from pnpo_megatron.algorithm import make_objective, policy_loss
from pnpo_megatron.parallel.prefix_scan import ratio_stats
from pnpo_megatron.parallel.vocab_logprobs import chunked_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, VOCAB = 1536, 151_936
"""Of R1-Distill-Qwen-1.5B."""


@pytest.fixture(scope="module")
def numbers() -> Iterator[dict[str, Any]]:
    """Written to $GPU_CHECK_JSON at the end, whatever failed on the way."""
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "untested here": ["NCCL", "TransformerEngine", "several GPUs", "vLLM"],
    }
    yield found
    if target := os.environ.get("GPU_CHECK_JSON"):
        Path(target).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def timed(run: Callable[[], Any], rounds: int = 3) -> float:
    """Fastest of some rounds, in seconds; one more is run first."""
    seconds = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return min(seconds[1:])


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes above what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_the_cpu_patches_stay_out(numbers: dict[str, Any]) -> None:
    import pnpo_megatron.policy.learner  # noqa: F401

    assert "pnpo_megatron.policy.cpu_backend" not in sys.modules
    assert torch.zeros(1, device="cuda").is_cuda and torch.cuda.current_device() == 0
    numbers["cpu_backend"] = "not loaded"


def test_chunked_logprobs_in_bfloat16_against_float64(numbers: dict[str, Any]) -> None:
    tokens = 4096
    draw = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(tokens, HIDDEN, generator=draw, device="cuda").bfloat16().requires_grad_()
    weight = (0.05 * torch.randn(VOCAB, HIDDEN, generator=draw, device="cuda")).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(VOCAB, HIDDEN, device="cuda")  # type: ignore[attr-defined]
    labels = torch.randint(0, VOCAB, (tokens,), generator=draw, device="cuda")

    def run() -> torch.Tensor:
        logprobs, _ = chunked_logprobs(
            hidden, weight, labels, temperature=1.0, vocab_size=VOCAB, tp_group=None, chunk_tokens=1024
        )
        logprobs.sum().backward()
        return logprobs.detach()

    found = run()
    rows = torch.arange(0, tokens, 16, device="cuda")
    logits = hidden.detach()[rows].double() @ weight.detach().double().t()
    wanted = logits.log_softmax(1).gather(1, labels[rows, None])[:, 0]
    error = float((found[rows].double() - wanted).abs().max())
    p = logits.softmax(1)
    p[torch.arange(len(rows)), labels[rows]] -= 1
    gradient = -p @ weight.detach().double()
    assert hidden.grad is not None
    relative = float((hidden.grad[rows].double() - gradient).norm() / gradient.norm())
    del logits, p
    hidden.grad = None
    peak = peak_of(run)
    whole = 4 * tokens * VOCAB
    numbers["chunked log-probs"] = {
        "tokens": tokens,
        "largest error (nats)": error,
        "gradient error": relative,
        "peak MiB": peak / 2**20,
        "whole logits MiB": whole / 2**20,
        "seconds": timed(run),
    }
    assert error < 1e-4  # bfloat16 logits alone would be off by 0.02
    assert relative < 0.01
    assert peak < whole / 4


@pytest.mark.parametrize("name", ["pnpo", "gspo", "grpo"])
def test_the_objective_at_512_responses_of_15360_tokens(numbers: dict[str, Any], name: str) -> None:
    count, length = 512, 15_360
    draw = torch.Generator("cuda").manual_seed(2)
    size = count * length
    old = -torch.rand(size, generator=draw, device="cuda")
    policy = (old + 0.05 * torch.randn(size, generator=draw, device="cuda")).requires_grad_()
    mask = torch.ones(size, dtype=torch.bool, device="cuda")
    position = torch.arange(1, length + 1, device="cuda").repeat(count)
    lengths = torch.full((size,), length, device="cuda")
    chunks = torch.full((count,), length // 2, device="cuda")
    advantages = torch.randn(count, generator=draw, device="cuda").repeat_interleave(length)
    share = torch.full((size,), 1 / size, device="cuda")
    objective = make_objective(name)

    def run() -> float:
        policy.grad = None
        stats = ratio_stats(policy, old, mask, position, lengths, chunks, None)
        loss, _ = policy_loss(objective, policy, stats, advantages, share)
        loss.backward()
        return float(loss.detach())

    assert math.isfinite(run())
    seconds, peak = timed(run), peak_of(run)
    numbers.setdefault("objective, 512 x 15,360", {})[name] = {
        "seconds": seconds,
        "tokens a second": size / seconds,
        "peak bytes a token": peak / size,
    }
    assert size / seconds > 50e6


def test_one_megatron_step_is_the_float64_formulas(numbers: dict[str, Any], tmp_path: Path) -> None:
    """float32 without TF32, local spec: loss and gradient norm of one update, and weights 1 before it."""
    from learner_parts import GATES, make_learner, random_sequences, share
    from reference_policy import ReferencePolicy, write_model

    from pnpo_megatron.policy.process_groups import start_distributed

    start_distributed()
    folder = write_model(tmp_path / "hf")
    policy = ReferencePolicy(folder)
    sequences = policy.drifted(random_sequences(9, seed=1), 0.05, seed=2)
    reference = policy.update(sequences, "pnpo")
    norm = math.sqrt(sum(float(one.square().sum()) for one in reference.gradients.values()))
    learner = make_learner(folder, max_tokens=64)
    metrics = learner.update(share(sequences, "response"), make_objective("pnpo", **GATES["pnpo"]), step=1)
    numbers["one step, float32"] = {
        "loss error": abs(metrics["loss"] - reference.loss) / reference.scale,
        "gradient norm error": abs(metrics["grad_norm"] / norm - 1),
    }
    assert numbers["one step, float32"]["loss error"] < 1e-4
    assert numbers["one step, float32"]["gradient norm error"] < 1e-4


@pytest.mark.parametrize(("recompute", "fused"), [("none", False), ("none", True), ("full", False)])
def test_bytes_of_a_bfloat16_step_are_what_the_doctor_says(
    numbers: dict[str, Any], tmp_path: Path, recompute: str, fused: bool
) -> None:
    """Four layers of R1-Distill-Qwen-1.5B's shape, one sequence of 16,384 tokens."""
    from hf_models import make_hf_model, save_hf_model
    from learner_parts import make_learner, share, with_old

    from pnpo_megatron.parallel.settings import ParallelSettings
    from pnpo_megatron.planning.activations import Modules, logits_bytes, saved_bytes, working_bytes
    from pnpo_megatron.policy.optimizer import OptimizerSettings
    from pnpo_megatron.policy.process_groups import start_distributed
    from pnpo_megatron.types import TrainSequence

    start_distributed()
    tokens = 16_384
    shape = {"hidden_size": HIDDEN, "intermediate_size": 8960, "num_hidden_layers": 4, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
    model = make_hf_model("qwen2", **shape, **heads, initializer_range=0.02).bfloat16()
    folder = save_hf_model(model, tmp_path / "hf")
    learner = make_learner(
        folder,
        dtype=torch.bfloat16,
        recompute=recompute,
        max_tokens=tokens,
        optimizer=OptimizerSettings(lr=1e-6, warmup_steps=0),
        megatron={"bias_activation_fusion": fused},
    )
    ids = torch.randint(0, VOCAB, (tokens,))
    mask = torch.arange(tokens) >= 1024
    one = TrainSequence(ids, mask, torch.zeros(tokens), 1.0)
    scored = with_old([one], learner.log_probs(share([one], "response")))
    batch, objective = share(scored, "response"), make_objective("pnpo")
    metrics = learner.update(batch, objective, step=1)
    peak = peak_of(lambda: learner.update(batch, objective, step=1))
    arch, modules = learner.arch, Modules(2, recompute, fused_swiglu=fused)
    planned = (
        saved_bytes(arch, ParallelSettings(), modules, tokens=tokens, layers=4, last=True)
        + working_bytes(arch, ParallelSettings(), modules, tokens=tokens)
        + logits_bytes(arch, ParallelSettings(), tokens=tokens)
    )
    numbers[f"bfloat16 step, recompute {recompute}, SwiGLU {'fused' if fused else 'plain'}"] = {
        "seconds": timed(lambda: learner.update(batch, objective, step=1)),
        "peak GB above the state": peak / 1e9,
        "planned GB": planned / 1e9,
        "rejected at update 1": metrics["gate/rejected_fraction"],
        "largest weight - 1 at update 1": max(metrics["weight/max"] - 1, 1 - metrics["weight/min"]),
    }
    assert metrics["gate/rejected_fraction"] == 0.0
    assert planned == pytest.approx(peak, rel=0.15)


def test_an_optimizer_on_the_host_takes_the_same_step(numbers: dict[str, Any], tmp_path: Path) -> None:
    from learner_parts import make_learner, random_sequences, share, with_old
    from reference_policy import write_model

    from pnpo_megatron.policy.optimizer import OptimizerSettings
    from pnpo_megatron.policy.process_groups import start_distributed

    start_distributed()
    folder = write_model(tmp_path / "hf")
    after = {}
    for offload in (0.0, 1.0):
        settings = OptimizerSettings(lr=1e-3, warmup_steps=0, offload=offload)
        learner = make_learner(folder, dtype=torch.bfloat16, max_tokens=256, optimizer=settings)
        sequences = random_sequences(9, seed=1)
        scored = with_old(sequences, learner.log_probs(share(sequences, "response")))
        for _ in range(2):
            learner.update(
                share(scored, "response"), make_objective("pnpo", gate_low=1.0, gate_high=1.0), step=1
            )
        after[offload] = torch.cat([tensor.float().flatten().cpu() for _, tensor in learner.export_hf()])
    numbers["optimizer on the host"] = {
        "largest difference of a weight": float((after[0.0] - after[1.0]).abs().max()),
    }
    assert (after[0.0] - after[1.0]).abs().max() < 0.01
