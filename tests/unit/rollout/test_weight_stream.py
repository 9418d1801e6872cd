"""Weights from GPU to GPU without one: what is sent, in which order, and what happens when somebody fails.

`fake_server.Air` plays the other end of NCCL; in `test_vllm_receiver` vLLM's own code reads the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_server import Air, FakeServer
from hf_models import make_hf_model
from tiny_models import hf_tensors, save_qwen2
from torch import Tensor

from pnpo_megatron.cli import main
from pnpo_megatron.convert.families import hf_shapes, read_architecture
from pnpo_megatron.convert.hf_headers import read_json
from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout import server_client, server_fleet, server_stream, vllm_sampler, weight_stream
from pnpo_megatron.rollout.messages import (
    Command,
    Done,
    Ready,
    Reply,
    StreamWeights,
    WeightBucket,
    WeightsLoaded,
)
from pnpo_megatron.rollout.server_sampler import ServerSampler
from pnpo_megatron.rollout.settings import EngineSettings, SamplerSettings
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.rollout.weight_stream import buckets
from pnpo_megatron.types import Prompt, Sampling

# anyio says so when a connection is cancelled while it is being made
pytestmark = pytest.mark.filterwarnings("ignore:coroutine 'connect_tcp")
MIXED = {
    "embed": torch.randn(5, 7),
    "norm": torch.randn(3).bfloat16(),
    "big": torch.randn(40, 8),
    "step": torch.tensor(3, dtype=torch.int64),
    "turned": torch.randn(6, 4).T,
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in MIXED.items()}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 60_000)
    monkeypatch.setattr(server_stream, "Broadcaster", Air)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(server_client, "HEALTH_S", 5.0)


def test_buckets_hold_every_tensor_in_order_and_no_more_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 200)
    found, sizes = {}, []
    for entries, packed in buckets(MIXED.items(), SHAPES):
        sizes.append(packed.numel())
        assert packed.dtype == torch.uint8
        for entry in entries:
            dtype = getattr(torch, entry.dtype)
            part = packed[entry.offset :][: MIXED[entry.name].numel() * dtype.itemsize]
            found[entry.name] = part.clone().view(dtype).view(entry.shape)
    assert sizes == [146, 1280, 104], "embed and norm; big alone; step and turned"
    assert list(found) == list(MIXED)
    assert all(torch.equal(found[name], tensor) for name, tensor in MIXED.items())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (MIXED | {"norm": torch.tensor([1.0, float("nan"), 2.0])}, "norm holds NaN"),
        ({name: tensor for name, tensor in MIXED.items() if name != "step"}, "missing step"),
        (MIXED | {"other": torch.ones(1)}, "other is not a tensor of this model"),
        (MIXED | {"big": torch.ones(8, 40)}, r"big is \[8, 40\]"),
    ],
)
def test_a_model_that_is_not_whole_is_never_sent_to_its_end(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        list(buckets(tensors.items(), SHAPES))


def sampler_of(
    folder: Path, *servers: FakeServer, stream: bool = True, timeout_s: float = 8.0
) -> ServerSampler:
    settings = SamplerSettings(engine_of(folder), str, sync_timeout_s=timeout_s, stream=stream)
    return ServerSampler(settings, [server.url for server in servers])


def engine_of(folder: Path) -> EngineSettings:
    return EngineSettings(str(folder), "float32", max_model_len=64, kv_cache_memory_bytes=2**20)


@pytest.fixture
def pair() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer() as one, FakeServer("127.0.0.2") as other:
        one.workers, other.workers = 2, 3
        yield one, other


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"), 1)


def merged(server: FakeServer) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for part in server.received:
        assert not found.keys() & part.keys()
        found |= part
    return found


def test_h32_every_worker_of_every_server_is_met_and_gets_every_tensor_once(
    folder: Path, pair: tuple[FakeServer, FakeServer]
) -> None:
    tensors = hf_tensors(folder)
    with sampler_of(folder, *pair) as sampler:
        sampler.load_weights(tensors.items(), 3)
        streamed = sampler.weights_digest
        groups = list(sampler.generate([Prompt("p", (1, 2), "")], 2, Sampling(1.0, 8), (1,)))
    assert Air.last.ranks == set(range(1 + 2 + 3)) and Air.last.left
    number = len(Air.last.sent)
    assert number > 4
    for server in pair:
        assert merged(server) == {name: tensor.tolist() for name, tensor in tensors.items()}
        assert list(merged(server)) == list(tensors)
        assert server.routes == [
            "/pause", "/start_weight_update", "/init_weight_transfer_engine",
            *["/update_weights"] * (number + 1), "/finish_weight_update", "/reset_prefix_cache", "/resume",
        ]  # fmt: skip
        assert server.weights.endswith("/3")
    assert [rollout.version for rollout in groups[0].rollouts] == [3, 3]
    with sampler_of(folder, *pair, stream=False) as sampler:
        sampler.load_weights(tensors.items(), 3)
        assert sampler.weights_digest == streamed, "stored rollouts are found again, whatever the way"


def test_a_server_that_fails_in_the_middle_ends_the_sync_for_all_and_is_named(
    folder: Path, pair: tuple[FakeServer, FakeServer]
) -> None:
    pair[1].refuse["/update_weights"] = deque([(500, "out of memory")])
    with sampler_of(folder, *pair) as sampler:
        with pytest.raises(
            RolloutError,
            match=rf"{pair[1].url}: HTTP 500: out of memory; waited for {pair[0].url}, the trainer",
        ):
            sampler.load_weights(hf_tensors(folder).items(), 3)
        assert sampler.version is None
        pair[0].wait(lambda: Air.last.left)
    assert "/resume" not in pair[0].routes + pair[1].routes


def test_a_worker_that_does_not_come_is_waited_for_until_the_deadline(
    folder: Path, pair: tuple[FakeServer, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair[0], "_receive_broadcast", lambda entries: pair[0].gate.wait(10))
    pair[0].gate.clear()
    with (
        sampler_of(folder, *pair, timeout_s=2.0) as sampler,
        pytest.raises(RolloutError, match=rf"weight sync over NCCL: .*{pair[0].url}"),
    ):
        sampler.load_weights(hf_tensors(folder).items(), 3)
    pair[0].wait(lambda: Air.last.left)


def test_a_server_that_is_gone_before_a_sync_is_left_out_and_the_ranks_close_up(
    folder: Path, pair: tuple[FakeServer, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_fleet, "WATCH_S", 0.05)
    with sampler_of(folder, *pair) as sampler:
        sampler.wait_ready()
        pair[0].kill()
        sampler.load_weights(hf_tensors(folder).items(), 3)
    assert Air.last.ranks == {0, 1, 2, 3}
    assert merged(pair[1]).keys() == hf_tensors(folder).keys()


@pytest.mark.parametrize("stream", [False, True])
def test_experts_reach_every_server(
    tmp_path: Path, pair: tuple[FakeServer, FakeServer], stream: bool
) -> None:
    make_hf_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    shapes = hf_shapes(read_architecture(read_json(tmp_path / "config.json"), "here"))
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    experts = [name for name in tensors if ".experts." in name]
    with sampler_of(tmp_path, *pair, stream=stream) as sampler:
        sampler.load_weights(tensors.items(), 1)
        with pytest.raises(RolloutError, match=f"missing {experts[-1]}"):
            sampler.load_weights([(name, one) for name, one in tensors.items() if name != experts[-1]], 2)
    assert len(experts) > 10
    for server in pair:
        received = {name: one for part in server.received for name, one in part.items()}
        assert all(received[name] == tensors[name].tolist() for name in tensors)


class FakeWorker:
    """A child process that takes what it is lent."""

    def __init__(self, *_: object) -> None:
        self.commands: list[Command] = []
        self.waiting: list[Reply] = [Ready(0.0, "fake")]

    def send(self, command: Command) -> None:
        self.commands.append(command)
        whole = isinstance(command, WeightBucket) and not command.entries
        number = sum(len(one.entries) for one in self.commands if isinstance(one, WeightBucket))
        assert isinstance(command, StreamWeights | WeightBucket)
        self.waiting.append(WeightsLoaded(command.call, 5, number) if whole else Done(command.call))

    def receive(self, deadline: float, waiting_for: str) -> Reply:
        return self.waiting.pop(0)

    def close(self, timeout_s: float) -> None:
        pass


def test_a_child_process_is_lent_one_bucket_at_a_time_and_cannot_be_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker()
    monkeypatch.setattr(vllm_sampler, "WorkerProcess", lambda *_: worker)
    monkeypatch.setattr(vllm_sampler, "ipc_handle", lambda packed: {"GPU-1": (packed.clone(),)})
    tensors = hf_tensors(folder)
    settings = SamplerSettings(engine_of(folder), str, restarts=2, stream=True)
    with VllmSampler(settings, log_path=folder / "engine.log") as sampler:
        sampler.load_weights(tensors.items(), 5)
        assert sampler.version == 5 and sampler._restarts == 0
    first, *lent, last = worker.commands
    assert isinstance(first, StreamWeights) and isinstance(last, WeightBucket) and not last.entries
    sent = [entry.name for one in lent if isinstance(one, WeightBucket) for entry in one.entries]
    assert sent == list(tensors)
    first_bucket = lent[0]
    assert isinstance(first_bucket, WeightBucket)
    name = first_bucket.entries[0].name
    (packed,) = first_bucket.content["GPU-1"]
    assert torch.equal(packed.view(torch.float32)[: tensors[name].numel()], tensors[name].view(-1))


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--rollout.weight_transfer=ipc"], "no CUDA device"),
        (
            ["--rollout.weight_transfer=nccl", "--rollout.engine=server", "--rollout.servers=http://a:1"],
            "no CUDA device",
        ),
        (["--rollout.weight_transfer=nccl"], 'rollout.engine = "vllm"'),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_way_that_is_not_there_is_refused_in_one_line_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], found: str
) -> None:
    (tmp_path / "config.toml").write_text('[model]\nhf = "none"\n[data]\nprompts = "none.jsonl"\n')
    assert main(["train", str(tmp_path / "config.toml"), f"--run.folder={tmp_path}/run", *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "rollout.weight_transfer" in said and found in said
