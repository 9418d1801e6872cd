"""Weights between hosts: a stream for who knows the token, on one address, while the sync lasts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.messages import TensorEntry
from pnpo_megatron.rollout.weight_network import WeightOffer, receive
from pnpo_megatron.rollout.weight_transfer import WeightSender

WEIGHTS = {"big": torch.arange(300_000.0), "odd": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16)}


@pytest.fixture
def sent() -> Iterator[tuple[WeightSender, tuple[TensorEntry, ...], int]]:
    sender = WeightSender({name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()})
    entries, nbytes = sender.write(WEIGHTS.items())
    yield sender, entries, nbytes
    sender.close()


@pytest.fixture
def offer(sent: tuple[WeightSender, tuple[TensorEntry, ...], int]) -> Iterator[WeightOffer]:
    offer = WeightOffer(sent[0].fd, sent[2], 5.0)
    yield offer
    offer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_every_tensor_arrives_whole_from_the_same_host_and_from_another(
    sent: tuple[WeightSender, tuple[TensorEntry, ...], int], offer: WeightOffer, host: str
) -> None:
    source = offer.source(host)
    assert ("path" in source) == (host != "127.0.0.2")
    with receive(source, sent[2]) as receiver:
        found = {name: tensor.clone() for name, tensor in receiver.tensors(sent[1])}
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())


def test_the_port_is_on_one_address_and_gives_nothing_without_the_token(offer: WeightOffer) -> None:
    source = offer.source("127.0.0.2")
    assert offer.source("127.0.0.2") == source, "one port for all servers on that way"
    assert source["address"] == "127.0.0.1"
    with socket.create_connection((source["address"], source["port"]), 5.0) as stranger:
        stranger.sendall(b"?" * 32)
        assert stranger.recv(1) == b""
    with pytest.raises(OSError), socket.create_connection(("127.0.0.3", source["port"]), 5.0):
        pass
    offer.close()
    with pytest.raises(RolloutError, match="cannot be reached"), receive(source, 8):
        pass


def test_a_stream_that_ends_early_is_an_error(
    sent: tuple[WeightSender, tuple[TensorEntry, ...], int], offer: WeightOffer
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(RolloutError, match=rf"ended after {sent[2]} of {sent[2] + 1} bytes"),
        receive(offer.source("127.0.0.2"), sent[2] + 1),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "the memory for it is given back; one port is open"


def test_memory_of_another_host_says_what_to_write_instead() -> None:
    with (
        pytest.raises(RolloutError, match="address other than 127.0.0.1 in rollout.servers"),
        receive({"path": "/proc/1/fd/12345"}, 8),
    ):
        pass
