"""The command that starts a rollout server; nothing is started here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pnpo_megatron import serve
from pnpo_megatron.config import load_config
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.rollout.server_client import NEEDED

CONFIG = """
[model]
hf = "folder"
dtype = "float32"
[data]
prompts = "none.jsonl"
[rollout]
max_prompt_tokens = 100
max_response_tokens = 50
max_num_seqs = 7
kv_cache_bytes = 1048576
threads = 3
[eval]
max_response_tokens = 60
"""


class Started(Exception):
    """Instead of another program in this process."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command; what would have been executed, and its environment."""
    (tmp_path / "config.toml").write_text(CONFIG)

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        raise Started(command, environment)

    monkeypatch.setattr(os, "execve", execve)

    def run(*words: str) -> tuple[list[str], dict[str, str]]:
        with pytest.raises(Started) as started:
            serve.main([str(tmp_path / "config.toml"), *words])
        return started.value.args

    return run


def test_a_server_listens_on_this_machine_only_unless_told_otherwise(start, caplog):
    command, _ = start("--port", "8001")
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert not caplog.text
    command, _ = start("--port", "8001", "--host", "10.0.0.5")
    assert command[command.index("--host") + 1] == "10.0.0.5"
    assert "asks for no password" in caplog.text


def test_a_server_has_the_trainers_engine_settings_and_what_the_trainer_checks(start):
    command, _ = start("--port", "8001", "--rollout.max_num_seqs=9", "--", "--tensor-parallel-size", "2")
    values = dict(zip(command, command[1:], strict=False))
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[-2:] == ["--tensor-parallel-size", "2"]
    flags = {"--enforce-eager", "--skip-tokenizer-init", "--no-enable-chunked-prefill", "--enable-scale-out"}
    assert flags <= set(command)
    assert (
        values.items()
        >= {
            "--model": "folder",
            "--dtype": "float32",
            "--max-model-len": "160",
            "--max-num-seqs": "9",
            "--kv-cache-memory-bytes": "1048576",
            "--logprobs-mode": NEEDED["model_config", "logprobs_mode"],
            "--generation-config": NEEDED["model_config", "generation_config"],
            "--weight-transfer-config": f'{{"backend": "{NEEDED["weight_transfer_config", "backend"]}"}}',
            "--worker-extension-cls": "pnpo_megatron.rollout.vllm_transfer.Extension",
        }.items()
    )


def test_a_server_knows_nothing_of_a_launcher_and_has_a_core_process(start, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    _, environment = start("--port", "8001")
    assert not environment.keys() & {"RANK", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING"}
    assert (
        environment.items()
        >= {
            "VLLM_SERVER_DEV_MODE": "1",
            "OMP_NUM_THREADS": "3",
            "PNPO_SERVER_PID": str(os.getpid()),
        }.items()
    )


def test_servers_and_engine_belong_together(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    for flags in (
        ["--rollout.engine=server"],
        ["--rollout.servers=http://a:1"],
        ["--rollout.engine=server", "--rollout.servers=http://a:1,http://a:1"],
    ):
        with pytest.raises(ConfigError, match="give each address once"):
            load_config(path, flags)
    with pytest.raises(ConfigError, match="rollout.servers"):
        load_config(path, ["--rollout.engine=server", "--rollout.servers=a:1"])
