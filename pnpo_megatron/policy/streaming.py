"""Megatron checkpoints written and read one tensor at a time, with no model in memory: the converters' way.

A model on the meta device says through Megatron's own `sharded_state_dict` under which key, at which offset
and in which pieces each parameter lies in a torch_dist checkpoint. Its bytes are fetched when its turn comes.
"""

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import register_default_common_strategies
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.overrides import TorchFunctionMode

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.families import all_rows, dtype_of
from pnpo_megatron.convert.family import EMBEDDING, HEAD, Row
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.stream import fuse, is_table, split
from pnpo_megatron.errors import ConversionError
from pnpo_megatron.manifest import Digest, Follower
from pnpo_megatron.policy.checkpoint import HF_FILES, check_architecture, tensor_list
from pnpo_megatron.policy.checkpoint_save import without_crc
from pnpo_megatron.policy.model import build_model
from pnpo_megatron.policy.process_groups import ParallelSettings

Advance = Callable[[int], None]
"""Told the bytes of each tensor that is done."""


class _OnMeta(TorchFunctionMode):
    """Every new tensor on the meta device, also where the code names another: Megatron names the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Only a ``device`` argument is changed."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def blueprint(arch: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """Megatron's sharded state of a whole model without data, by parameter name; groups are of size 1."""
    with torch.device("meta"), _OnMeta():
        (model,) = build_model(arch, ParallelSettings(), dtype=dtype, engine=False)
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = model.sharded_state_dict(metadata=groups)
    return state


def pieces(base: ShardedTensor | ShardedTensorFactory, data: Tensor) -> list[ShardedTensor]:
    """The stored pieces of one parameter, as views of ``data``: gate and up lie apart in a checkpoint."""
    filled = replace(base, data=data)
    return list(nested_values({"": filled.build()})) if isinstance(filled, ShardedTensorFactory) else [filled]


def _chunk(piece: ShardedTensor) -> ChunkStorageMetadata:
    sizes = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
    return ChunkStorageMetadata(torch.Size(piece.global_offset), torch.Size(sizes))


def _index(piece: ShardedTensor) -> MetadataIndex:
    return MetadataIndex(piece.key, torch.Size(piece.global_offset))


class _OnDemand(dcp.DefaultSavePlanner):
    """Writes the listed items in their order and asks for the data of each when it is written."""

    def __init__(self, items: list[WriteItem], fetch: Callable[[WriteItem], Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.items, self.fetch = items, fetch

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor or bytes of one item."""
        return self.fetch(write_item)

    def create_local_plan(self) -> SavePlan:
        """All items, in one file."""
        self.plan = SavePlan(self.items)
        return self.plan


class _Writer(dcp.FileSystemWriter):
    """One file. Torch's own `write_data` keeps the last tensor of every key."""

    digests: dict[str, Digest]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Ask for each item, write it and forget it."""
        name, results = f"{plan.storage_data.prefix}0.distcp", []
        path = Path(self.path) / name
        with path.open("wb") as file, Follower(path) as follower:
            for item in plan.items:
                start = file.tell()
                _write(planner.resolve_data(item), file)
                file.flush()
                follower.reached(file.tell())
                size = file.tell() - start
                results.append(WriteResult(item.index, size, _StorageInfo(name, start, size)))
            self.digests = {name: follower.digest(file.tell())}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def storage_meta(self) -> StorageMeta:
        """Without the folder's name, which is about to change."""
        return StorageMeta()


def _write(data: Tensor | io.BytesIO, file: IO[bytes]) -> None:
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
    else:
        with without_crc():
            torch.save(_alone(data), file)


def _alone(data: Tensor) -> Tensor:
    """The same bytes behind a storage of their own: a view would be saved with all that lies behind it."""
    own = torch.from_numpy(data.contiguous().view(-1).view(torch.uint8).numpy())
    return own.view(data.dtype).view(data.shape)


class _Streamed(SaveShardedStrategy):
    """Megatron's torch_dist format, with the data of one parameter in memory."""

    can_handle_sharded_objects = True

    def __init__(self, fetch: Callable[[MetadataIndex], Tensor]) -> None:
        super().__init__("torch_dist", 1)
        self.fetch = fetch
        self.digests: dict[str, Digest] = {}

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write the shards and their index; what is not a tensor is a small object."""
        entries = list(nested_values(sharded_state_dict))
        objects = {entry.unique_key: entry.data for entry in entries if isinstance(entry, ShardedObject)}
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects]
        items += [_write_item(entry) for entry in entries if isinstance(entry, ShardedTensor)]

        def resolve(item: WriteItem) -> Tensor | io.BytesIO:
            if item.tensor_data is not None:
                return self.fetch(item.index).view(item.tensor_data.chunk.sizes)
            buffer = io.BytesIO()
            torch.save([objects[item.index.fqn]], buffer)
            return buffer

        writer = _Writer(checkpoint_dir)
        try:
            dcp.save({}, storage_writer=writer, planner=_OnDemand(items, resolve))
        except CheckpointException as error:  # wraps what happened on each rank; there is one
            raise error.failures[0][0] from None
        self.digests = writer.digests


def _write_item(piece: ShardedTensor) -> WriteItem:
    data = TensorWriteData(_chunk(piece), TensorProperties(piece.dtype), torch.Size(piece.global_shape))
    return WriteItem(_index(piece), WriteItemType.SHARD, tensor_data=data)


def write_weights(
    folder: Path, source: HfFolder, dtype: torch.dtype, content: dict[str, Any], advance: Advance
) -> dict[str, Digest]:
    """Write the weights of an HF folder as a checkpoint of any layout. Memory: one Megatron parameter.

    Args:
        folder: empty.
        source: the HF folder, known to be complete.
        dtype: of the model's parameters.
        content: what the checkpoint says of itself.
        advance: called with the bytes of each piece written.

    Returns:
        The digests of the files with weights.
    """
    state = blueprint(source.architecture, dtype)
    rows = {row.megatron: row for row in all_rows(source.architecture)}
    home = {_index(piece): name for name in rows for piece in pieces(state[name], state[name].data)}
    latest: tuple[str, dict[MetadataIndex, Tensor]] = ("", {})

    def fetch(index: MetadataIndex) -> Tensor:
        nonlocal latest
        if latest[0] != home[index]:
            latest = ("", {})  # before the next is made
            base, row = state[home[index]], rows[home[index]]
            fused = fuse(row, source, padded=base.data.shape[0]).to(base.data.dtype)
            latest = (home[index], {_index(piece): piece.data for piece in pieces(base, fused)})
        advance(latest[1][index].nbytes)
        return latest[1][index]

    register_default_common_strategies()  # a learner in this process has put its own in their place
    strategy = _Streamed(fetch)
    dist_checkpointing.save(dict(state), str(folder), strategy, content_metadata=content)
    return strategy.digests


class _Into(dcp.DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the target that an item fills."""
        return narrow_tensor_by_index(self.target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: the part is a view."""


class _Reader(dcp.FileSystemReader):
    """Reads a chunk that is wanted whole straight into its place; torch reads it, then copies it there."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Leave to torch what is stored in other pieces than it is wanted in."""
        rest = [item for item in plan.items if not self._read_whole(item, planner.resolve_tensor(item))]
        return super().read_data(replace(plan, items=rest), planner)

    def _read_whole(self, item: ReadItem, target: Tensor) -> bool:
        info: _StorageInfo = self.storage_data[item.storage_index]
        if info.transform_descriptors or not target.is_contiguous():
            return False
        with (self.path / info.relative_path).open("rb") as file:  # type: ignore[operator]
            stored = torch.load(self._slice_file(file, info), map_location="meta", weights_only=True)
            if (stored.shape, stored.dtype, stored.is_contiguous()) != (target.shape, target.dtype, True):
                return False
            place = stored.untyped_storage()._checkpoint_offset + stored.storage_offset() * stored.itemsize
            file.seek(info.offset + place)
            left = target.view(-1).view(torch.uint8).numpy().data
            while left:  # the kernel gives at most 2 GiB at once
                if not (read := file.readinto(left)):
                    raise EOFError(f"{info.relative_path} ends {len(left)} bytes early")
                left = left[read:]
        return True


_WEIGHTS = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""What a model's keys begin with; the rest of a checkpoint is the optimizer's."""


class WeightsReader:
    """The weights in a checkpoint of any layout, one HF tensor at a time.

    Raises:
        ConversionError: the index cannot be read, or the weights are not those of the architecture.
    """

    def __init__(self, folder: Path, arch: Architecture) -> None:
        self.folder, self.arch = folder, arch
        check_architecture(folder, arch)
        metadata = tensor_list(folder)
        self.stored = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and key.startswith(_WEIGHTS)
        }
        if EMBEDDING.megatron not in self.stored:
            raise ConversionError(f"{folder} has no {EMBEDDING.megatron}: it holds no whole language model")
        self.chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        self.reader = _Reader(folder)
        self.reader.set_up_storage_reader(metadata, is_coordinator=True)

    def dtype(self) -> torch.dtype:
        """Of the embedding."""
        return self.stored[EMBEDDING.megatron].properties.dtype

    def tensors(self, dtype: torch.dtype, advance: Advance) -> Iterator[tuple[str, Tensor]]:
        """Every HF tensor in export order, as ``dtype``. Memory: two Megatron parameters."""
        state = blueprint(self.arch, self.dtype())
        self._refuse_unknown(state)
        for row in all_rows(self.arch):
            for name, tensor in split(row, self._read(state[row.megatron], row), self.arch):
                yield name, tensor.to(dtype_of(name, dtype))
                advance(tensor.numel() * dtype.itemsize)

    def _refuse_unknown(self, state: dict[str, Any]) -> None:
        """Nothing is dropped in silence: every weight stored must be one of the model's, and of its shape."""
        wanted = {
            piece.key: piece.global_shape[is_table(row) :]  # padding may differ
            for row in all_rows(self.arch)
            for piece in pieces(state[row.megatron], state[row.megatron].data)
        }
        for key, entry in self.stored.items():
            table = key in (EMBEDDING.megatron, HEAD.megatron)
            if wanted.get(key) != tuple(entry.size)[table:]:
                raise ConversionError(
                    f"{self.folder} holds {key} as {list(entry.size)}; its {HF_FILES}/config.json calls for "
                    f"{wanted.get(key, 'no such weight')}: use the checkpoint as it was saved"
                )

    def _read(self, base: ShardedTensor | ShardedTensorFactory, row: Row) -> Tensor:
        data = torch.empty_like(base.data, device="cpu")
        for piece in pieces(base, data):
            needed = (data[: self.arch.vocab] if is_table(row) else piece.data).numel()  # padding may differ
            found = self._fill(piece)
            if found < needed:
                raise ConversionError(
                    f"{self.folder} holds {found} of the {needed} numbers of {row.megatron}; "
                    "it is damaged or of another model: copy it again"
                )
        return data

    def _fill(self, piece: ShardedTensor) -> int:
        if piece.key not in self.stored:
            return 0
        chunk = _chunk(piece)
        stored = replace(self.stored[piece.key], chunks=self._near(piece))
        items = create_read_items_for_chunk_list(piece.key, stored, [chunk])
        try:
            self.reader.read_data(LoadPlan(items), _Into(piece.data.view(chunk.sizes)))
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ConversionError(
                f"{self.folder} is damaged at {piece.key}: {error}; copy it again"
            ) from None
        return sum(item.lengths.numel() for item in items)

    def _near(self, piece: ShardedTensor) -> list[ChunkStorageMetadata]:
        """The stored chunks of the same layer and expert: a key of all experts has tens of thousands."""
        axes = piece.prepend_axis_num
        if piece.key not in self.chunks:
            by_place = self.chunks[piece.key] = {}
            for chunk in self.stored[piece.key].chunks:
                by_place.setdefault(tuple(chunk.offsets[:axes]), []).append(chunk)
        return self.chunks[piece.key].get(tuple(piece.global_offset[:axes]), [])
