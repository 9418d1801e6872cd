"""Megatron's data-parallel wrapper and AdamW, the learning rate by steps, a step that may be refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_model_config
from torch import Tensor

from pnpo_megatron.errors import ConfigError
from pnpo_megatron.policy import loss_scale

SCHEDULES = ("constant", "cosine", "linear")

PIECE = 1 << 20
"""Numbers of a gradient that are copied to float64 at a time."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule; a step is a rollout batch, so reuse and skips never shift the rate."""

    lr: float = 1e-6
    warmup_steps: int = 10
    schedule: str = "constant"
    total_steps: int = 150
    """Where cosine and linear decay end."""
    weight_decay: float = 0.1
    """Of matrices only; 1-D parameters and biases have none."""
    clip_grad: float = 1.0
    """Global gradient norm; 0 does not clip."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    distributed: bool = True
    """Shard optimizer states over data-parallel ranks."""
    offload: float = 0.0
    """Share of the optimizer's state and work that is the host's (GPUs only)."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(f'optimizer.schedule = "{self.schedule}": use one of {", ".join(SCHEDULES)}')
        if self.overlap_param_gather and not (self.distributed and self.overlap_grad_reduce):
            raise ConfigError(
                "optimizer.overlap_param_gather = true needs optimizer.distributed and "
                "optimizer.overlap_grad_reduce; set both to true, or overlap_param_gather to false"
            )
        if self.offload and not (self.distributed and torch.cuda.is_available()):
            raise ConfigError(
                f"optimizer.offload = {self.offload} needs GPUs and optimizer.distributed = true; use 0"
            )


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """lr(s) = lr * min(1, s / warmup) * decay(s), constant within a step.

    Args:
        step: rollout batches, from 1. The first has rate lr / warmup and the last more than 0, so no batch is
            sampled for nothing: cosine and linear decay would reach 0 one step after the last.
    """
    warmup = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    start = max(settings.warmup_steps, 1)
    decayed = min(max((step - start) / max(settings.total_steps + 1 - start, 1), 0.0), 1.0)
    factor = {"constant": 1.0, "linear": 1.0 - decayed, "cosine": 0.5 * (1.0 + math.cos(math.pi * decayed))}
    return settings.lr * warmup * factor[settings.schedule]


def wrap_data_parallel(chunks: Sequence[Any], settings: OptimizerSettings) -> list[DistributedDataParallel]:
    """Megatron's DDP around every model chunk: gradients are *summed* over data and context parallelism.

    Args:
        chunks: Float16Module or GPTModel, one per virtual pipeline stage, built in per-token mode.
    """
    config = get_model_config(chunks[0])
    loss_scale.require(config)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        use_distributed_optimizer=settings.distributed,
        check_for_nan_in_grad=False,  # a gradient that is not finite skips the update instead (GPU.md 13)
    )
    for chunk in chunks:
        chunk.to(torch.cuda.current_device())  # Megatron leaves routers on the host until they are first used
        _mark_copied_experts(chunk, config)
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    elif settings.distributed:
        for chunk in wrapped:
            _keep_from_oneself(chunk)
    return wrapped


def _keep_from_oneself(chunk: DistributedDataParallel) -> None:
    """A rank that shares parameters with no other has the whole gradient and all weights: Megatron would send
    them to itself all the same, which gloo turns into copies."""
    for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        if bucket_group.intra_distributed_optimizer_instance_size == 1:
            vars(bucket_group).update(start_grad_sync=_nothing, start_param_sync=_nothing)


def _nothing(**_: Any) -> None:
    """In the place of a collective of one rank."""


def _mark_copied_experts(chunk: Any, config: Any) -> None:
    """Let tensor-parallel ranks add up the gradients of experts that each of them holds whole.

    Under sequence parallelism each rank feeds its copy with its own tokens. Megatron reduces experts over
    the ranks that share them only if they are split (layers.py:886); copies would drift apart in silence.
    """
    copied = config.tensor_model_parallel_size > config.expert_tensor_parallel_size
    if config.num_moe_experts is not None and copied and config.expert_model_parallel_size == 1:
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False


def make_optimizer(
    chunks: Sequence[DistributedDataParallel], settings: OptimizerSettings
) -> MegatronOptimizer:
    """Megatron's AdamW over wrapped chunks; the distributed one shards its states over DP x CP."""
    dtype = next(chunks[0].parameters()).dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.distributed,
        overlap_param_gather=settings.overlap_param_gather,
        optimizer_cpu_offload=settings.offload > 0.0,
        optimizer_offload_fraction=settings.offload,
        use_torch_optimizer_for_cpu_offload=settings.offload > 0.0,
    )
    optimizer = get_megatron_optimizer(config, list(chunks))
    for part in optimizer.chained_optimizers[:-1]:
        if isinstance(part, DistributedOptimizer):
            # Megatron gathers all weights after the step of each part: after the last one is enough.
            vars(part)["step_with_ready_grads"] = super(DistributedOptimizer, part).step_with_ready_grads
    if not settings.offload:  # Megatron fills an offloaded state itself
        _fill_state(optimizer)
    return optimizer


def _fill_state(optimizer: MegatronOptimizer) -> None:
    """Zero moments and a step count from the start: Adam makes them at its first step, and a run whose first
    updates were all skipped must be saved, and restored, like any other."""
    for part in optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            if group["params"]:
                group.setdefault("step", 0)


def set_learning_rate(optimizer: MegatronOptimizer, settings: OptimizerSettings, step: int) -> float:
    """Give every parameter group its rate and decay for a step; returns the rate."""
    rate = learning_rate(settings, step)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_mult"]
        # Megatron leaves the whole decay in every group; its own scheduler applies the multiplier.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    return rate


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Global norm of the summed gradient, over all shards; not finite if anything in it, or squared, is not.

    In float64: Megatron's float32 norm of 28 million numbers is off by a thousandth on CPUs, and another
    split would clip by another number. Collective over all ranks, so it does not matter which parts a rank
    has: without a distributed optimizer, several hold the same. Copies the gradients to where
    `apply_gradient` reads them.
    """
    optimizer.prepare_grads()
    shards = gradients(optimizer)
    squares = product_over_shards(optimizer, shards, shards)
    return math.inf if squares > torch.finfo(torch.float32).max else math.sqrt(squares)  # Adam squares it too


def gradients(optimizer: MegatronOptimizer) -> list[list[Tensor]]:
    """This rank's shards of the gradient, by part of the optimizer; `gradient_norm` prepares them."""
    return [part.get_main_grads_for_grad_norm() for part in optimizer.chained_optimizers]


def product_over_shards(
    optimizer: MegatronOptimizer, one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]
) -> float:
    """Inner product in float64 of two gradients as `gradients` gives them. Collective over all ranks."""
    total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    for part, a, b in zip(optimizer.chained_optimizers, one, other, strict=True):
        copies = dist.get_world_size() / dist.get_world_size(part.get_grad_stats_parallel_group())
        total += _product(a, b) / copies
    dist.all_reduce(total)
    return float(total)


def _product(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Scalar float64; in pieces, so that no gradient is copied whole."""
    total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a.reshape(-1).split(PIECE), b.reshape(-1).split(PIECE), strict=True):
            wide = x.double()
            total += (wide * (wide if a is b else y.double())).sum()  # in pairs; a dot product loses 1e-12
    return total


def apply_gradient(optimizer: MegatronOptimizer, clip_grad: float, norm: float) -> None:
    """Clip by a norm already known and step. Collective: agree on stepping before calling it (GPU.md 13)."""
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if parameters and clip_grad > 0.0:
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, clip_grad, norm, decoupled)
    optimizer.step_with_ready_grads()
