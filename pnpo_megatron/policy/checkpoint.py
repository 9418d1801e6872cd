"""Sharded checkpoints of model and optimizer, in Megatron's torch_dist format, published whole or not at all.

A checkpoint folder holds Megatron's files, ``architecture.json`` (what the weights are of), optionally
``hf/`` (config and tokenizer files, so that it can be converted back without its source), and what the caller
adds, such as the run state.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import MegatronOptimizer

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.hf_folder import HfFolder, sync_folder
from pnpo_megatron.convert.hf_headers import read_json
from pnpo_megatron.convert.stream import unwrapped
from pnpo_megatron.errors import ConversionError
from pnpo_megatron.parallel.groups import ParallelGroups

ARCHITECTURE_FILE = "architecture.json"
HF_FILES = "hf"


def save_checkpoint(
    folder: Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    groups: ParallelGroups,
    *,
    portable: bool = True,
    source: HfFolder | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint to ``folder.tmp`` and rename it when every rank has written. Collective.

    Args:
        folder: the final name.
        chunks: model chunks, wrapped in DDP or not.
        optimizer: None saves weights only.
        portable: the optimizer state loads under any layout, at the price of gathering it over data-parallel
            ranks; otherwise only tensor and pipeline sizes as now will do.
        source: HF folder whose small files are stored along, for conversion without it.
        finish: called on rank 0 with the unpublished folder, to add what belongs to the checkpoint.
    """
    partial = folder.with_name(folder.name + ".tmp")
    if groups.world_rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _wait_for_all(groups)
    _finish_parameter_gather(chunks)
    _use_in_process_queue()
    with _without_deprecations():
        dist_checkpointing.save(
            _sharded_state(chunks, optimizer, portable=portable, is_loading=False),
            str(partial),
            content_metadata={
                "portable": portable,
                "has_optimizer": optimizer is not None,
                "layout": _model_layout(groups, chunks),
            },
        )
    if groups.world_rank == 0:
        _write_side_files(partial, unwrapped(chunks[0]).arch, source)  # type: ignore[arg-type]
        if finish is not None:
            finish(partial)
        _publish(partial, folder)
    _wait_for_all(groups)


def load_checkpoint(
    folder: Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    groups: ParallelGroups,
) -> None:
    """Fill model chunks, and the optimizer if one is given, from a checkpoint. Collective.

    Raises:
        ConversionError: the checkpoint is of another architecture, incomplete, without the optimizer state
            that is asked for (TRAPS H29), or its optimizer state belongs to another layout.
    """
    check_architecture(folder, unwrapped(chunks[0]).arch)  # type: ignore[arg-type]
    content = checkpoint_content(folder)
    if optimizer is not None and not content["has_optimizer"]:
        raise ConversionError(
            f"{folder} has no optimizer state, so training cannot go on from it; give it as "
            "model.init to start anew"
        )
    layout = _model_layout(groups, chunks)
    if optimizer is not None and not content["portable"] and content["layout"] != layout:
        raise ConversionError(
            f"{folder} holds optimizer state for {_described(content['layout'])} only; this run has "
            f"{_described(layout)}. Go on from a portable checkpoint (checkpoint.portable_every), or set "
            f"the sizes back"
        )
    state = _sharded_state(chunks, optimizer, portable=bool(content["portable"]), is_loading=True)
    strict = StrictHandling.RAISE_ALL if optimizer is not None else StrictHandling.RAISE_UNEXPECTED
    try:
        with _without_deprecations():
            loaded = dist_checkpointing.load(state, str(folder), strict=strict)
    except CheckpointingException as error:
        raise ConversionError(f"{folder} does not fit this model and layout: {error}") from error
    for index, chunk in enumerate(chunks):
        unwrapped(chunk).load_state_dict(loaded[f"model{index}"])
    if optimizer is not None:
        # Megatron copies into leaf views of the fp32 parameters, which autograd forbids outside no_grad.
        with torch.no_grad():
            optimizer.load_state_dict(loaded["optimizer"])
    _wait_for_all(groups)


def _model_layout(groups: ParallelGroups, chunks: Sequence[torch.nn.Module]) -> dict[str, int]:
    """The sizes that a checkpoint which is not portable is bound to."""
    return {"tensor": groups.tp_size, "pipeline": groups.pp_size, "virtual_pipeline": len(chunks)}


def _described(layout: dict[str, int]) -> str:
    return ", ".join(f"parallel.{key} = {value}" for key, value in layout.items())


def checkpoint_content(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds: ``portable``, ``has_optimizer`` and the ``layout`` it was written under.

    Raises:
        ConversionError: not a complete checkpoint of this project.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise ConversionError(
            f"{folder} is not a complete torch_dist checkpoint; point to a step_NNNNNN folder"
        )
    state = dist_checkpointing.load_common_state_dict(str(folder))
    content: dict[str, Any] | None = dist_checkpointing.load_content_metadata(preloaded_state_dict=state)
    if not content or "has_optimizer" not in content:
        raise ConversionError(f"{folder} was not written by this project: it does not say what it holds")
    return content


def check_architecture(folder: Path, arch: Architecture) -> None:
    """Compare a checkpoint's architecture with a model's.

    Raises:
        ConversionError: naming the first field that differs.
    """
    found = read_json(folder / ARCHITECTURE_FILE)
    for key, value in asdict(arch).items():
        if found.get(key) != value:
            raise ConversionError(
                f"{folder} holds a model with {key} = {found.get(key)}; the model built has {value}. "
                "Use the checkpoint of this model, or the model folder it came from"
            )


def _sharded_state(
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    *,
    portable: bool,
    is_loading: bool,
) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable" if portable else "dp_reshardable",
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
def _without_deprecations() -> Iterator[None]:
    """Megatron 0.16 uses names that torch 2.13 warns about; nobody here can act on them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _use_in_process_queue() -> None:
    """Megatron starts a manager process for write results, which re-imports the main program; for a save that
    is waited for, the results never leave this process."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _write_side_files(partial: Path, arch: Architecture, source: HfFolder | None) -> None:
    (partial / ARCHITECTURE_FILE).write_text(json.dumps(asdict(arch), indent=2) + "\n", encoding="utf-8")
    if source is not None:
        (partial / HF_FILES).mkdir()
        for path in source.other_files():
            shutil.copyfile(path, partial / HF_FILES / path.name)


def _publish(partial: Path, folder: Path) -> None:
    """Flush every file, then swap names; a folder of that name, left by a crash before ``latest`` moved,
    gives way."""
    for path in [path for path in partial.rglob("*") if path.is_file()]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
        sync_folder(path)
    stale = folder.with_name(folder.name + ".old.tmp")
    shutil.rmtree(stale, ignore_errors=True)
    if folder.exists():
        folder.rename(stale)
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(stale, ignore_errors=True)


def _wait_for_all(groups: ParallelGroups) -> None:
    """Over gloo, with the group's time limit: NCCL would spin on GPUs that others use."""
    if groups.control is not None:
        dist.barrier(group=groups.control)
