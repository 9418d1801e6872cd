"""Two real vLLM servers on this machine: one shares the trainer's memory, the other gets weights over TCP."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_task import (
    ROOT,
    environment,
    finish,
    make_task,
    read_metrics,
    start_training,
    without_times,
    write_config,
)
from torch import Tensor

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.server_sampler import ServerSampler
from pnpo_megatron.rollout.settings import EngineSettings, SamplerSettings
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.types import Prompt, RolloutGroup, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MAX_LEN, START_S = 20, 900.0
WARM, GREEDY = Sampling(1.0, 12), Sampling(0.0, 12)
MANY = Sampling(1.0, 12, min_tokens=12)


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]

    def family(self) -> list[int]:
        """It and what it has started."""
        found, waiting = [], [self.process.pid]
        while waiting:
            found.append(pid := waiting.pop())
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return found

    def end(self) -> None:
        for pid in self.family() if self.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


@dataclass
class Setting:
    task: Path
    second: dict[str, Tensor]
    """Other weights for the same model."""
    servers: list[Server]
    sampler: ServerSampler
    fresh: VllmSampler
    """An engine in a child process that has read the second weights from a folder."""

    @property
    def first(self) -> dict[str, Tensor]:
        return load_file(self.task / "model" / "model.safetensors")


def free_port(host: str) -> int:
    with socket.socket() as one:
        one.bind((host, 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    root = tmp_path_factory.mktemp("servers")
    task = make_task(root, request.param)
    config = write_config(task, root / "run", steps=2)
    other = root / "other"
    shutil.copytree(task / "model", other)
    torch.manual_seed(9)
    second = {
        name: tensor + 0.1 * torch.randn_like(tensor)
        for name, tensor in load_file(other / "model.safetensors").items()
    }
    save_file(second, other / "model.safetensors", metadata={"format": "pt"})
    servers = [start_server(config, host, root / f"{host}.log") for host in ("127.0.0.1", "127.0.0.2")]
    engine = EngineSettings(str(task / "model"), "float32", MAX_LEN, 16777216, max_num_seqs=32)
    settings = SamplerSettings(engine, str, initial_version=0, start_timeout_s=START_S)
    other_settings = replace(settings, engine=replace(engine, model_folder=str(other), max_num_seqs=256))
    try:
        with (
            ServerSampler(settings, [server.url for server in servers]) as sampler,
            VllmSampler(other_settings, log_path=root / "engine.log") as fresh,
        ):
            sampler.wait_ready()
            yield Setting(task, second, servers, sampler, fresh)
    finally:
        for server in servers:
            server.end()


def start_server(config: Path, host: str, log: Path) -> Server:
    port = free_port(host)
    command = [
        sys.executable,
        "-m",
        "pnpo_megatron",
        "serve",
        str(config),
        "--host",
        host,
        "--port",
        str(port),
    ]
    flags = [
        "--rollout.max_num_seqs=32",
        "--",
        "--uvicorn-log-level",
        "warning",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags], env=environment(), cwd=ROOT, stdout=output, stderr=output
        )
    return Server(f"http://{host}:{port}", process)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", (3 + i % 10, 4 + i // 10 % 10, 13, 5, 14), "") for i in range(count)]


def by_id(groups: Iterator[RolloutGroup]) -> dict[str, RolloutGroup]:
    found: dict[str, RolloutGroup] = {}
    for group in groups:
        assert group.prompt.id not in found
        found[group.prompt.id] = group
    return found


def tokens(group: RolloutGroup) -> list[list[int]]:
    return [rollout.response_ids.tolist() for rollout in group.rollouts]


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + seconds
        time.sleep(0.02)
    return time.monotonic() - started


def test_h32_after_a_sync_both_servers_equal_a_fresh_engine_in_a_child_process(setting: Setting) -> None:
    few = prompts(40)
    before = by_id(setting.sampler.generate(few, 1, GREEDY, (1,)))
    started = time.monotonic()
    setting.sampler.load_weights(setting.second.items(), 5)
    print(f"sync of two servers: {time.monotonic() - started:.2f} s")
    for group_size, sampling in ((1, GREEDY), (4, WARM)):
        ours = by_id(setting.sampler.generate(few, group_size, sampling, (1,)))
        theirs = by_id(setting.fresh.generate(few, group_size, sampling, (1,)))
        assert ours.keys() == theirs.keys()
        for name, group in ours.items():
            assert tokens(group) == tokens(theirs[name])
            for one, other in zip(group.rollouts, theirs[name].rollouts, strict=True):
                assert torch.equal(one.rollout_logprobs, other.rollout_logprobs)
                assert (one.version, one.finish_reason) == (5, other.finish_reason)
        if sampling is GREEDY:
            assert sum(tokens(before[name]) != tokens(group) for name, group in ours.items()) > 20
    setting.sampler.load_weights(setting.first.items(), 6)
    back = by_id(setting.sampler.generate(few, 1, GREEDY, (1,)))
    assert {name: tokens(group) for name, group in back.items()} == {
        name: tokens(group) for name, group in before.items()
    }


def test_a_run_with_servers_is_the_run_with_a_child_process(setting: Setting) -> None:
    runs = {}
    servers = ",".join(server.url for server in setting.servers)
    for name, flags in (
        ("child", []),
        ("servers", ["--rollout.engine=server", f"--rollout.servers={servers}"]),
    ):
        folder = setting.task / name
        config = write_config(setting.task, folder, steps=2)
        code, output = finish(start_training(config, *flags), 400.0)
        assert code == 0, output
        runs[name] = without_times(read_metrics(folder))
    assert runs["servers"] == runs["child"]


def test_an_evaluation_by_servers_is_the_one_by_a_child_process(setting: Setting, tmp_path: Path) -> None:
    samples = {}
    servers = ",".join(server.url for server in setting.servers)  # they hold the weights of a trained run
    for name, flags in (("servers", ["--servers", servers]), ("child", ["--kv-cache-bytes", "16777216"])):
        out = tmp_path / name
        command = [
            sys.executable, "-m", "pnpo_megatron", "eval", "--model", str(setting.task / "other"),
            "--benchmark", str(setting.task / "problems.jsonl"), "--template", "raw", "--samples", "4",
            "--max-prompt-tokens", "8", "--max-response-tokens", "12", "--dtype", "float32",
            "--out", str(out), *flags,
        ]  # fmt: skip
        done = subprocess.run(
            command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        samples[name] = (out / "step_000000.jsonl").read_text()
    assert samples["servers"] == samples["child"]
    assert samples["child"].count("\n") == 40


def test_a_sync_that_fails_in_a_server_stops_with_its_words_and_the_next_one_recovers(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pnpo_megatron.rollout.weight_transfer.checksum", lambda data: 1)
        with pytest.raises(RolloutError, match=r"weight sync: http://127\.0\.0\.\d:\d+: .*checksum differs"):
            setting.sampler.load_weights(setting.second.items(), 7)
    with pytest.raises(RolloutError, match="call load_weights"):
        setting.sampler.generate(prompts(1), 1, GREEDY, (1,))
    setting.sampler.load_weights(setting.second.items(), 8)
    ours, theirs = (
        by_id(one.generate(prompts(9), 1, GREEDY, (1,))) for one in (setting.sampler, setting.fresh)
    )
    assert all(tokens(ours[name]) == tokens(theirs[name]) for name in theirs)


def test_servers_killed_while_generating(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    sampler, (doomed, other) = setting.sampler, setting.servers
    many = prompts(100)
    started = time.monotonic()
    expected = by_id(sampler.generate(many, 8, MANY, (2,)))
    family = doomed.family()
    assert len(family) > 1
    groups = sampler.generate(many, 8, MANY, (2,))
    got = [next(groups)]
    os.kill(doomed.process.pid, signal.SIGKILL)
    got += groups
    assert sorted(group.prompt.id for group in got) == sorted(expected)
    assert all(tokens(group) == tokens(expected[group.prompt.id]) for group in got)
    assert f"rollout server {doomed.url} is gone" in caplog.text and other.url not in caplog.text
    doomed.process.wait(10)
    gone = wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family), 10.0)
    print(f"a killed server's other processes ended {gone:.2f} s after the batch")

    groups = sampler.generate(many, 8, MANY, (3,))
    next(groups)
    os.kill(other.process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RolloutError, match="every rollout server is gone"):
        list(groups)
    seconds = time.monotonic() - started
    print(f"error {seconds:.2f} s after the last server was killed")
    assert seconds < 10.0
