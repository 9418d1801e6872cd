"""Life and death of the worker process, without an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_qwen2

from pnpo_megatron.errors import ConfigError, ConversionError, RolloutError
from pnpo_megatron.rollout import vllm_sampler
from pnpo_megatron.rollout.messages import Ready
from pnpo_megatron.rollout.settings import EngineSettings, SamplerSettings
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.rollout.worker_process import WorkerDied, worker_environment
from pnpo_megatron.types import Prompt, Sampling

TRAINER = """
import sys, time
from pathlib import Path
from pnpo_megatron.rollout.settings import EngineSettings, SamplerSettings
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
engine = EngineSettings(sys.argv[1], "float32", max_model_len=128, kv_cache_memory_bytes=2**24)
sampler = VllmSampler(SamplerSettings(engine, str), log_path=Path(sys.argv[1]) / "worker.log")
print(sampler.worker_pid, flush=True)
time.sleep(60)
"""


def make_sampler(folder: Path, max_model_len: int = 128, **changes: Any) -> VllmSampler:
    engine = EngineSettings(str(folder), "float32", max_model_len, kv_cache_memory_bytes=2**24)
    return VllmSampler(SamplerSettings(engine, str, **changes), log_path=folder / "worker.log")


def ended(pid: int) -> bool:
    """No such process, or one that only waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_ended(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not ended(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return ended(pid)


class DeafWorker:
    """Ready at once, never answers, and is dead once it is closed."""

    started = 0

    def __init__(self, *arguments: object, **settings: object) -> None:
        type(self).started += 1
        self._closed, self._ready = threading.Event(), True

    def send(self, command: object) -> None:
        pass

    def receive(self, deadline: float, waiting_for: str) -> Ready:
        if self._ready:
            self._ready = False
            return Ready(0.1, "deaf")
        self._closed.wait(deadline - time.monotonic())
        raise WorkerDied(f"the rollout worker is gone while waiting for {waiting_for}")

    def close(self, timeout_s: float) -> None:
        self._closed.set()


def test_closing_beside_a_thread_that_samples_ends_it_and_starts_no_other_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_sampler, "WorkerProcess", DeafWorker)
    monkeypatch.setattr(DeafWorker, "started", 0)
    sampler = make_sampler(save_qwen2(tmp_path / "model", 1), initial_version=0, restarts=2)
    sampler.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        asked = [Prompt("p", (1, 2), "")], 2, Sampling(1.0, 4), ("x",)
        groups = pool.submit(lambda: list(sampler.generate(*asked)))
        time.sleep(0.2)  # either way the thread must end; it waits by now on any machine that is awake
        sampler.close()
        with pytest.raises(WorkerDied, match="is gone"):
            groups.result(timeout=20)
    assert DeafWorker.started == 1


def test_the_workers_environment_has_no_trace_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
    for name in (*launcher, "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    cpu = worker_environment("cpu", threads=3)
    assert not launcher & cpu.keys()
    assert "VLLM_CPU_KVCACHE_SPACE" not in cpu and cpu["KEPT"] == "yes"
    assert (cpu["OMP_NUM_THREADS"], cpu["TORCHDYNAMO_DISABLE"], cpu["HF_HUB_OFFLINE"]) == ("3", "1", "1")
    assert not {"TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"} & worker_environment("cuda", threads=3).keys()
    assert os.environ["RANK"] == "1"


def test_a_killed_trainer_takes_the_worker_with_it_and_leaves_no_shared_memory(tmp_path: Path) -> None:
    save_qwen2(tmp_path, 1)
    before = set(os.listdir("/dev/shm"))
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)],
        env=worker_environment("cpu", threads=1),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        assert not ended(worker)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(5)
        assert wait_until_ended(worker, 2.0)
    finally:
        trainer.kill()
        trainer.communicate(timeout=5)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "pnpo" in name]


def test_signals_to_the_whole_job_do_not_end_the_worker(tmp_path: Path) -> None:
    """TRAPS H38: Slurm's warning before the time limit goes to every process of a job, the engine's too."""
    worker = """
import os, signal, sys, types
engine = types.ModuleType("pnpo_megatron.rollout.vllm_worker")
signals = signal.SIGUSR1, signal.SIGTERM
engine.run = lambda control, weights: [os.kill(os.getpid(), n) for n in signals] and 3
sys.modules[engine.__name__] = engine
from pnpo_megatron.rollout.worker_main import main
sys.exit(main([*sys.argv[1:4], str(os.getppid())]))
"""
    lifeline, ours = os.pipe()
    command = [sys.executable, "-c", worker, str(lifeline), str(lifeline), str(lifeline)]
    try:
        options = {"timeout": 60, "check": False, "start_new_session": True}
        finished = subprocess.run(command, pass_fds=[lifeline], **options)
    finally:
        os.close(lifeline)
        os.close(ours)
    assert finished.returncode == 3, "it lived to return what the engine returned"


def test_an_engine_that_does_not_start_in_time_is_an_error_that_says_so(tmp_path: Path) -> None:
    with make_sampler(save_qwen2(tmp_path, 1), start_timeout_s=0.1) as sampler:
        with pytest.raises(RolloutError, match=r"waited for the engine to start \(0.1 s, start_timeout_s"):
            sampler.wait_ready()
        pid = sampler.worker_pid
        sampler.close()
    assert wait_until_ended(pid, 2.0)


def test_a_worker_that_dies_before_it_is_ready_shows_the_last_lines_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/ls")  # any program that fails on the worker's arguments
    with make_sampler(save_qwen2(tmp_path, 1)) as sampler:
        started = time.monotonic()
        with pytest.raises(RolloutError, match="ended with exit code [12] (?s:.*)ls: "):
            sampler.wait_ready()
        assert time.monotonic() - started < 2.0


def test_a_context_longer_than_the_models_positions_is_refused_before_anything_starts(tmp_path: Path) -> None:
    save_qwen2(tmp_path / "model", 1)
    with pytest.raises(ConfigError, match="max_model_len = 1024: .* has 512 positions"):
        make_sampler(tmp_path / "model", max_model_len=1024)
    with pytest.raises(ConversionError, match="nowhere is not a folder"):
        make_sampler(tmp_path / "nowhere")


class FakeWorker:
    """Is ready at once and knows no command."""

    pid = 0

    def __init__(self, *arguments: object) -> None:
        self.sent: list[object] = []

    def receive(self, deadline: float, waiting_for: str) -> Ready:
        return Ready(0.0, "fake")

    def send(self, command: object) -> None:
        self.sent.append(command)

    def close(self, timeout_s: float) -> None:
        pass


def test_h33_generation_is_refused_until_the_version_of_the_weights_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_sampler, "WorkerProcess", FakeWorker)
    folder = save_qwen2(tmp_path, 1)
    prompts, sampling = [Prompt("p", (1, 2), "")], Sampling(1.0, 4)
    with make_sampler(folder) as sampler:
        with pytest.raises(RolloutError, match="call load_weights before generate"):
            sampler.generate(prompts, 2, sampling, (1,))
        assert not sampler._worker.sent  # type: ignore[attr-defined]
    with make_sampler(folder, initial_version=0) as sampler:
        sampler.generate(prompts, 2, sampling, (1,))
        assert len(sampler._worker.sent) == 1  # type: ignore[attr-defined]
