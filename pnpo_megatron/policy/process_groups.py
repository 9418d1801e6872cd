"""Starts torch.distributed and Megatron's process groups, and hands them on as one `ParallelGroups`."""

import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup, distributed_c10d

from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.parallel.settings import ParallelSettings


def start_distributed(timeout_s: float = 1800.0) -> None:
    """Join the process group that torchrun or Slurm describe in the environment, or a group of this process
    alone.

    Collectives of CPU tensors go over gloo and, where there is a GPU, those of CUDA tensors over NCCL.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def initialize_parallel(
    settings: ParallelSettings,
    *,
    seed: int,
    timeout_s: float = 1800.0,
    control_timeout_s: float | None = None,
) -> ParallelGroups:
    """Set up Megatron's groups and random state on the running torch.distributed.

    Args:
        seed: of Megatron's random-number tracker.
        timeout_s: longest wait of a collective.
        control_timeout_s: longest wait for rank 0 while it samples, evaluates or writes; None: the same.

    Raises:
        ConfigError: the sizes do not fit the ranks.
    """
    settings.data_size(dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor,
        pipeline_model_parallel_size=settings.pipeline,
        virtual_pipeline_model_parallel_size=settings.virtual_pipeline
        if settings.virtual_pipeline > 1
        else None,
        context_parallel_size=settings.context,
        expert_model_parallel_size=settings.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, int(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=control_timeout_s or timeout_s))
    return ParallelGroups(
        tp=_unless_alone(parallel_state.get_tensor_model_parallel_group()),
        pp=_unless_alone(parallel_state.get_pipeline_model_parallel_group()),
        cp=_unless_alone(parallel_state.get_context_parallel_group()),
        dp=_unless_alone(parallel_state.get_data_parallel_group()),
        dp_cp=_unless_alone(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        ep=_unless_alone(parallel_state.get_expert_model_parallel_group()),
        world=_unless_alone(dist.group.WORLD),
        control=_unless_alone(control),
    )


def make_deterministic() -> None:
    """GPU kernels and reductions that repeat bit for bit; call it before anything touches a device."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NCCL_ALGO"] = "Ring"
    torch.use_deterministic_algorithms(True)


def leave_distributed() -> None:
    """Wait for every rank, then end the process group: the first to leave may take the others down with
    it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def release_parallel() -> None:
    """Drop Megatron's groups, so that another layout can be set up in the same processes.

    Megatron only forgets them. A gloo group left behind keeps three threads that wake a hundred times a
    second, and a layout has about twenty groups, so they are destroyed here.
    """
    parallel_state.destroy_model_parallel()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def _unless_alone(group: ProcessGroup | None) -> ProcessGroup | None:
    return None if group is None or dist.get_world_size(group) == 1 else group
