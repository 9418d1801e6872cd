"""What of a model and its optimizer a checkpoint holds, and which rank writes what: Megatron's own plan."""

import io
import queue
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer

from pnpo_megatron.convert.stream import unwrapped
from pnpo_megatron.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class SavePlan:
    """What this rank writes, and what rank 0 adds."""

    writer: Any
    """Its `write_buckets` are this rank's files."""
    metadata: Any
    """Where every tensor lies; written last."""
    common: bytes
    """What is the same on every rank."""
    storages: set[int]
    """Memory of the state, which training will change."""


def plan_save(
    folder: Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    groups: ParallelGroups,
    *,
    portable: bool,
) -> SavePlan:
    """Plan a checkpoint in `folder`; writes nothing. Collective."""
    _finish_parameter_gather(chunks)
    sharded, common = _Sharded("torch_dist", 1, thread_count=1), _Common("torch", 1)
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, common)
    if filesystem_async._results_queue is None:  # else Megatron starts a manager process that is not used
        filesystem_async._results_queue = queue.Queue()
    content = {
        "portable": portable,
        "has_optimizer": optimizer is not None,
        "layout": model_layout(groups, chunks),
    }
    with without_deprecations():
        state = sharded_state(chunks, optimizer, portable=portable, is_loading=False)
        tensors = [getattr(one, "data", None) for one in nested_values(state)]
        storages = {storage_of(one) for one in tensors if isinstance(one, torch.Tensor)}
        dist_checkpointing.save(
            state, str(folder), sharded_strategy=sharded, async_sharded_save=True, content_metadata=content
        )
    return SavePlan(sharded.writer, sharded.metadata, common.content, storages)


class _Sharded(TorchDistSaveShardedStrategy):
    """Keeps the plan instead of writing."""

    writer: Any
    metadata: Any

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        writer.write_buckets = writer.write_buckets or []  # a rank that holds only copies writes nothing
        return AsyncRequest(None, (), [])


class _Common(TorchCommonSaveStrategy):
    """Keeps what is the same on every rank."""

    content = b""

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        """Megatron's hook."""
        buffer = io.BytesIO()
        torch.save(common_state_dict, buffer)
        self.content = buffer.getvalue()


def storage_of(tensor: torch.Tensor) -> int:
    """Names the memory that a tensor lies in."""
    return tensor.untyped_storage().data_ptr()


def model_layout(groups: ParallelGroups, chunks: Sequence[torch.nn.Module]) -> dict[str, int]:
    """The sizes that a checkpoint which is not portable is bound to."""
    return {
        "tensor": groups.tp_size,
        "pipeline": groups.pp_size,
        "virtual_pipeline": len(chunks),
        "expert": groups.ep_size,
    }


def sharded_state(
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    *,
    portable: bool,
    is_loading: bool,
) -> dict[str, Any]:
    """Megatron's description of the global tensors and of this rank's share in them."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable" if portable else "dp_reshardable",
        "chained_optim_avoid_prefix": True,  # names that do not depend on how many optimizers there are
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    # The model inside: DDP would put "module." before every name.
    state: dict[str, Any] = {
        f"model{index}": unwrapped(chunk).sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for index, chunk in enumerate(chunks)
    }
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            dict(state), is_loading=is_loading, metadata=metadata
        )
    return state


def _finish_parameter_gather(chunks: Sequence[Any]) -> None:
    """Parameters that `overlap_param_gather` still has on the way would be saved a step too old."""
    for chunk in chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Megatron 0.16 uses names that torch 2.13 warns about; nobody here can act on them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
