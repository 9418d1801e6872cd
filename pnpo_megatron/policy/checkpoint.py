"""Sharded checkpoints of model and optimizer, in Megatron's torch_dist format, published whole or not at all.

A checkpoint folder holds Megatron's files, ``architecture.json`` (what the weights are of), optionally
``hf/`` (config and tokenizer files, so that it can be converted back without its source), each rank's random
state, a manifest, and what the caller adds, such as the run state.
"""

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.metadata import Metadata

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.hf_headers import read_json
from pnpo_megatron.convert.stream import unwrapped
from pnpo_megatron.errors import ConversionError
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.policy.checkpoint_plan import model_layout, sharded_state, without_deprecations
from pnpo_megatron.policy.checkpoint_save import ARCHITECTURE_FILE
from pnpo_megatron.policy.checkpoint_save import HF_FILES as HF_FILES
from pnpo_megatron.policy.checkpoint_save import CheckpointSave as CheckpointSave

_PICKLED = {
    "torch": {"Size", "bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip
"""All that a list of tensors needs; a name that is not here could be code."""


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
    layout = model_layout(groups, chunks)
    if optimizer is not None and not content["portable"] and content["layout"] != layout:
        raise ConversionError(
            f"{folder} holds optimizer state for {_described(content['layout'])} only; this run has "
            f"{_described(layout)}. Go on from a portable checkpoint (checkpoint.portable_every), or set "
            "the sizes back"
        )
    state = sharded_state(chunks, optimizer, portable=bool(content["portable"]), is_loading=True)
    strict = StrictHandling.RAISE_ALL if optimizer is not None else StrictHandling.RAISE_UNEXPECTED
    try:
        with without_deprecations(), _data_only(folder):
            loaded = dist_checkpointing.load(state, str(folder), strict=strict)
    except CheckpointingException as error:
        raise ConversionError(f"{folder} does not fit this model and layout: {error}") from error
    for index, chunk in enumerate(chunks):
        unwrapped(chunk).load_state_dict(loaded[f"model{index}"])
    if optimizer is not None:
        # Megatron copies into leaf views of the fp32 parameters, which autograd forbids outside no_grad.
        with torch.no_grad():
            optimizer.load_state_dict(_regrouped(loaded["optimizer"], optimizer))
    if groups.control is not None:
        dist.barrier(group=groups.control)  # gloo, with its time limit: NCCL would spin on GPUs others use


def _regrouped(loaded: dict[Any, Any], optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """A distributed optimizer's state for the optimizers and parameter groups of this layout.

    Experts that are split have groups, and an optimizer, of their own; under another layout they have none.
    Of a group only the count of steps is state, the same in all: rate and decay are set at every update.
    """
    parts: Sequence[Any] = optimizer.chained_optimizers
    states = [loaded] if len(parts) == 1 else [loaded[index] for index in range(len(parts))]
    if "param_state" not in states[0]:
        return loaded
    inner = [one.get("optimizer") for one in (loaded, *loaded.values()) if isinstance(one, dict)]
    saved = [one["param_groups"] for one in inner if isinstance(one, dict)]
    (step,) = {group["step"] for groups in saved for group in groups if "step" in group}
    for part, state in zip(parts, states, strict=True):
        groups = part.state_dict()["optimizer"]["param_groups"]
        state["optimizer"] = {"param_groups": [group | {"step": step} for group in groups]}
        state.setdefault("param_state_sharding_type", "fully_reshardable")
    return loaded


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
    with _data_only(folder):
        state = dist_checkpointing.load_common_state_dict(str(folder))
    content: dict[str, Any] | None = dist_checkpointing.load_content_metadata(preloaded_state_dict=state)
    if not content or "has_optimizer" not in content:
        raise ConversionError(f"{folder} was not written by this project: it does not say what it holds")
    return content


def tensor_list(folder: Path) -> Metadata:
    """Which tensors a checkpoint holds, and where their pieces lie.

    Raises:
        ConversionError: the list is missing, damaged, or names something that is not data.
    """
    try:
        with (folder / ".metadata").open("rb") as file:
            listed = _DataUnpickler(file).load()
    except (
        OSError,
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        TypeError,
        ValueError,
        LookupError,
    ) as error:
        raise ConversionError(f"{folder}/.metadata is not a list of tensors: {error}") from error
    if not isinstance(listed, Metadata):
        raise ConversionError(f"{folder}/.metadata is not a list of tensors, but a {type(listed).__name__}")
    return listed


@contextmanager
def _data_only(folder: Path) -> Iterator[None]:
    """Nothing that a checkpoint names is run, also where Megatron and torch would unpickle anything.

    Raises:
        ConversionError: the list of tensors names something that is not data.
    """
    tensor_list(folder)
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        if before is not None:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _PICKLED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


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
