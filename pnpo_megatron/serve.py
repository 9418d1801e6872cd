"""`pnpo-megatron serve`: a vLLM server for rollouts, with the engine settings of a training configuration."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from pnpo_megatron.config import Config, load_config
from pnpo_megatron.config.rollouts import CPU_CACHE_BYTES, GPU_CACHE_BYTES
from pnpo_megatron.rollout.settings import EngineSettings
from pnpo_megatron.rollout.weight_network import BACKEND, SERVER_PID
from pnpo_megatron.rollout.worker_process import worker_environment

LOG = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"


def main(words: Sequence[str]) -> NoReturn:
    """Replace this process by the server; what follows ``--`` goes to vLLM as it stands."""
    cut = list(words).index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="pnpo-megatron serve",
        description=__doc__,
        epilog="example: pnpo-megatron serve CONFIG.toml --port 8001 -- --tensor-parallel-size 8",
    )
    parser.add_argument("config", help="the trainer's TOML file; --section.key=value as for train")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on; default: this machine only")
    arguments, overrides = parser.parse_known_args(words[:cut])
    config = load_config(arguments.config, overrides)
    engine = engine_settings(config)
    command = server_command(engine, arguments.host, arguments.port) + list(words[cut + 1 :])
    if arguments.host != LOOPBACK:
        LOG.warning(
            "whoever reaches %s:%d can use and change this server: it asks for no password",
            arguments.host,
            arguments.port,
        )
    os.execve(command[0], command, server_environment(engine.device, config.rollout.threads))


def server_command(engine: EngineSettings, host: str, port: int) -> list[str]:
    """vLLM's own server with the engine that the child process would have, and our weight transfer."""
    arguments = engine.arguments() | {
        "host": host,
        "port": port,
        "enable_scale_out": True,  # the routes that take and give token ids
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": "pnpo_megatron.rollout.vllm_transfer.Extension",
    }
    words = [word for name, value in arguments.items() for word in _flag(name, value)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]


def _flag(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]


def server_environment(device: str, threads: int) -> dict[str, str]:
    """The worker's, but for what a server needs: its routes for weights, and a core process of its own."""
    environment = worker_environment(device, threads) | {"VLLM_SERVER_DEV_MODE": "1"}
    environment[SERVER_PID] = str(os.getpid())  # execve keeps it
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    if device == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else every server of a host takes its core 0
    return environment


def engine_settings(config: Config) -> EngineSettings:
    """What the configuration says about an engine, wherever it runs."""
    rollout, on_gpu = config.rollout, torch.cuda.is_available()
    longest = max(rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    return EngineSettings(
        str(config.model.hf),
        config.model.dtype,
        max_model_len=rollout.max_prompt_tokens + longest,
        kv_cache_memory_bytes=rollout.kv_cache_bytes or default_cache_bytes(),
        max_num_seqs=rollout.max_num_seqs,
        enforce_eager=not on_gpu if rollout.enforce_eager is None else rollout.enforce_eager,
        device="cuda" if on_gpu else "cpu",
        routes=config.model.router_replay == "rollout",
    )


def default_cache_bytes() -> int:
    """Key-value cache of the engine where none is set."""
    return GPU_CACHE_BYTES if torch.cuda.is_available() else CPU_CACHE_BYTES
