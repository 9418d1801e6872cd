"""The shared buffer and its manifest, without an engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny_models import hf_tensors, save_qwen2, save_tied_llama
from torch import Tensor

from pnpo_megatron.convert.families import hf_shapes
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.weight_transfer import (
    WeightReceiver,
    WeightSender,
    checksum,
    is_finite,
)

Tensors = dict[str, Tensor]


def make_tensors() -> Tensors:
    return {
        "embed.weight": torch.randn(37, 5),
        "layer.bias": torch.randn(3).bfloat16(),
        "layer.weight": torch.randn(64, 1024).half(),
        "scale": torch.tensor(2.5, dtype=torch.float64),
    }


def make_sender(tensors: Tensors) -> WeightSender:
    return WeightSender({name: tuple(tensor.shape) for name, tensor in tensors.items()})


def test_tensors_arrive_bit_for_bit_with_their_names_shapes_and_dtypes() -> None:
    tensors = make_tensors()
    sender = make_sender(tensors)
    entries, nbytes = sender.write(tensors.items())
    received = dict(WeightReceiver(sender.fd).tensors(entries))
    assert list(received) == list(tensors) and nbytes <= sender.capacity
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


def test_a_second_write_replaces_the_first() -> None:
    first = make_tensors()
    second = {name: tensor + 1 for name, tensor in first.items()}
    sender = make_sender(first)
    receiver = WeightReceiver(sender.fd)
    sender.write(first.items())
    entries, _ = sender.write(second.items())
    assert all(torch.equal(tensor, second[name]) for name, tensor in receiver.tensors(entries))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_stops_the_sync(value: float, dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(8, 8), "b": torch.randn(100, 30).to(dtype)}
    tensors["b"][77, 13] = value
    with pytest.raises(RolloutError, match="b holds NaN or infinite"):
        make_sender(tensors).write(tensors.items())


def test_large_finite_values_are_finite_though_their_sum_is_not() -> None:
    assert is_finite(torch.full((4,), 3e38))
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))
    assert is_finite(torch.tensor([2**40]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[:-1], "missing scale"),
        (lambda pairs: [*pairs, ("lm_head.weight", torch.zeros(2))], "lm_head.weight is not a tensor"),
        (lambda pairs: [*pairs, pairs[0]], "embed.weight was sent twice"),
        (lambda pairs: [("embed.weight", torch.zeros(40, 5)), *pairs[1:]], r"is \[40, 5\].*\[37, 5\]"),
    ],
    ids=["missing", "extra", "twice", "shape"],
)
def test_a_set_of_tensors_other_than_the_models_is_refused(change, message) -> None:  # type: ignore[no-untyped-def]
    tensors = make_tensors()
    with pytest.raises(RolloutError, match=message):
        make_sender(tensors).write(change(list(tensors.items())))


def test_a_changed_byte_is_noticed_by_the_receiver() -> None:
    tensors = make_tensors()
    sender = make_sender(tensors)
    entries, _ = sender.write(tensors.items())
    os.pwrite(sender.fd, b"\x01", entries[2].offset + 1001)
    with pytest.raises(RolloutError, match=r"layer\.weight changed"):
        dict(WeightReceiver(sender.fd).tensors(entries))


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 100, 8 * 1024, 8 * 1024 * 3 + 808 + 5])
def test_the_checksum_depends_on_every_byte_and_on_its_place(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    reference = checksum(data)
    for place in sorted({0, nbytes // 2, nbytes - 1} & set(range(nbytes))):
        changed = data.clone()
        changed[place] ^= 1
        assert checksum(changed) != reference
    assert checksum(data.clone()) == reference


def test_the_checksum_notices_blocks_in_another_order() -> None:
    blocks = torch.randint(0, 256, (100, 512), dtype=torch.uint8)
    reference = checksum(blocks.flatten())
    for order in (torch.arange(100).flip(0), torch.arange(100).roll(1), torch.randperm(100)):
        assert checksum(blocks[order].flatten()) != reference
    assert checksum(torch.cat([blocks[1:], blocks[:1]]).flatten()) != reference


def test_the_buffer_is_no_file_that_a_killed_process_could_leave_behind() -> None:
    tensors = make_tensors()
    sender = make_sender(tensors)
    assert os.readlink(f"/proc/self/fd/{sender.fd}").startswith("/memfd:")
    assert os.fstat(sender.fd).st_nlink == 0
    fd = sender.fd
    sender.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("save", [save_qwen2, save_tied_llama])
def test_the_expected_names_are_those_of_an_export(save, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = save(tmp_path / "model", 1)
    exported = {name: tuple(tensor.shape) for name, tensor in hf_tensors(folder).items()}
    assert hf_shapes(HfFolder(folder).architecture) == exported
    assert ("lm_head.weight" in exported) == (save is save_qwen2)
