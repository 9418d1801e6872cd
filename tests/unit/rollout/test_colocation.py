"""Learner and engine take turns on one GPU, in one order (TRAPS H33). No GPU: calls are counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import hf_tensors, save_qwen2

from pnpo_megatron.config import load_config
from pnpo_megatron.errors import ConfigError, RolloutError
from pnpo_megatron.rollout import vllm_sampler
from pnpo_megatron.rollout.colocation import Turns
from pnpo_megatron.rollout.messages import (
    Command,
    Done,
    LoadWeights,
    Ready,
    Reply,
    Sleep,
    Wake,
    WeightsLoaded,
)
from pnpo_megatron.rollout.settings import EngineSettings, SamplerSettings
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.rollout.worker_process import WorkerDied
from pnpo_megatron.types import Prompt, Sampling


class Both:
    """Engine and learner on a GPU that has room for one of them; fails when both are there."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.on_gpu: set[str] = set()

    def wait_ready(self) -> None:
        self._take("weights", "kv_cache", "wait_ready")

    def sleep(self) -> None:
        self.calls.append("sleep")
        self.on_gpu -= {"weights", "kv_cache"}

    def wake(self, part: str) -> None:
        self._take(part, f"wake {part}")

    def offload(self) -> None:
        self.calls.append("offload")
        self.on_gpu -= {"optimizer"}

    def reload(self) -> None:
        self._take("optimizer", "reload")

    def send(self) -> None:
        assert "weights" in self.on_gpu and "kv_cache" not in self.on_gpu  # room to stage
        self.calls.append("send")

    def _take(self, *words: str) -> None:
        *parts, call = words
        self.calls.append(call)
        self.on_gpu |= set(parts)
        assert not ("optimizer" in self.on_gpu and len(self.on_gpu) > 1), self.calls


@pytest.fixture
def both() -> Both:
    return Both()


def test_the_gpu_changes_hands_in_the_one_order_that_fits(both: Both) -> None:
    turns = Turns(both)
    turns.begin()
    both.reload()  # the learner builds itself
    both.calls.clear()
    for _ in range(2):
        seconds = turns.to_engine(both, both.send) | turns.to_learner(both)
        assert seconds.keys() == {"time/offload_s", "time/wake_s", "time/send_s", "time/wake_cache_s",
                                  "time/sleep_s", "time/reload_s"}  # fmt: skip
    assert both.calls == ["offload", "wake weights", "send", "wake kv_cache", "sleep", "reload"] * 2


@pytest.mark.parametrize(
    ("before", "wrong", "found"),
    [
        ("", "to_engine", "nobody"),
        ("", "to_learner", "nobody"),
        ("begin", "begin", "learner"),
        ("begin", "to_learner", "learner"),
        ("begin to_engine", "to_engine", "engine"),
        ("begin to_engine", "begin", "engine"),
        ("begin to_engine to_learner", "to_learner", "learner"),
    ],
)
def test_any_other_order_is_refused_before_anything_is_touched(
    both: Both, before: str, wrong: str, found: str
) -> None:
    turns = Turns(both)
    calls: dict[str, Callable[[], object]] = {
        "begin": turns.begin,
        "to_engine": lambda: turns.to_engine(both, both.send),
        "to_learner": lambda: turns.to_learner(both),
    }
    for name in before.split():
        calls[name]()
    both.calls.clear()
    with pytest.raises(RolloutError, match=f"the turn of {found}, expected"):
        calls[wrong]()
    assert both.calls == []
    with pytest.raises(RolloutError, match="the turn of between two"):
        calls[wrong]()


def test_a_sync_that_fails_ends_the_taking_of_turns(both: Both) -> None:
    turns = Turns(both)
    turns.begin()

    def fail() -> None:
        raise RolloutError("broken weights")

    with pytest.raises(RolloutError, match="broken weights"):
        turns.to_engine(both, fail)
    assert "wake kv_cache" not in both.calls
    with pytest.raises(RolloutError, match="between two"):
        turns.to_learner(both)


class FakeWorker:
    """Answers at once; dies on demand."""

    def __init__(self, *_: object) -> None:
        self.commands: list[Command] = []
        self.waiting: list[Reply] = [Ready(0.0, "fake")]
        self.dies = False

    def send(self, command: Command) -> None:
        if self.dies:
            raise WorkerDied("killed")
        self.commands.append(command)
        if isinstance(command, LoadWeights):
            self.waiting.append(WeightsLoaded(command.call, command.version, len(command.entries)))
        elif isinstance(command, Sleep | Wake):
            self.waiting.append(Done(command.call))

    def receive(self, deadline: float, waiting_for: str) -> Reply:
        return self.waiting.pop(0)

    def close(self, timeout_s: float) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"), 1)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    made: list[FakeWorker] = []

    def make(*arguments: object) -> FakeWorker:
        made.append(FakeWorker())
        return made[-1]

    monkeypatch.setattr(vllm_sampler, "WorkerProcess", make)
    return made


def sampler_of(folder: Path) -> VllmSampler:
    engine = EngineSettings(
        str(folder), "float32", max_model_len=64, kv_cache_memory_bytes=2**20, sleep_mode=True
    )
    return VllmSampler(SamplerSettings(engine, str, initial_version=0), log_path=folder / "engine.log")


def test_h33_nothing_is_sampled_between_sleep_and_the_next_sync(
    folder: Path, workers: list[FakeWorker]
) -> None:
    with sampler_of(folder) as sampler:
        assert sampler.settings.engine.sleep_mode
        sampler.sleep()
        sampler.wake("weights")
        sampler.wake("kv_cache")
        with pytest.raises(RolloutError, match="call load_weights"):
            sampler.generate([Prompt("p", (1, 2), "")], 1, Sampling(1.0, 4), (1,))
        sampler.load_weights(hf_tensors(folder).items(), 3)
        assert sampler.version == 3
    (worker,) = workers
    names = [type(command).__name__ for command in worker.commands]
    assert names == ["Sleep", "Wake", "Wake", "LoadWeights"]
    assert [command.part for command in worker.commands if isinstance(command, Wake)] == [
        "weights",
        "kv_cache",
    ]


def test_an_engine_started_in_the_place_of_a_dead_one_is_awake(
    folder: Path, workers: list[FakeWorker]
) -> None:
    with sampler_of(folder) as sampler:
        sampler.sleep()
        workers[0].dies = True  # during the updates
        sampler.wake("weights")
        sampler.wake("kv_cache")
    assert len(workers) == 2 and workers[1].commands == []


CONFIG = """
[model]
hf = "folder"
[data]
prompts = "none.jsonl"
[rollout]
colocated = true
"""


@pytest.mark.parametrize(
    "flags",
    [
        ["--rollout.engine=server", "--rollout.servers=http://a:1"],
        ["--rollout.max_lag=1", "--objective.old_logprobs=rollout"],
        ["--rollout.replay=run"],
        ["--optimizer.offload=0.5"],
    ],
)
def test_what_cannot_take_turns_is_refused(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"colocated = true and .*take turns"):
        load_config(tmp_path / "config.toml", flags)
