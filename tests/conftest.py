"""Shared fixtures: processes that form a gloo group, and seeds."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from spawned import run_on_ranks, seed_all

Spawn = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, alone or in the suite."""
    seed_all()


@pytest.fixture(scope="session")
def process_server() -> Any:
    """A clean process that has imported the slow libraries once; ranks are forked from it in milliseconds."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for a GPU must not spoil later forks
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pnpo_megatron.run"])
    return context


@pytest.fixture
def spawn(process_server: Any) -> Spawn:
    """``spawn(function, ranks, *args, timeout_s=120)``: call it on every rank; the results, in rank order.

    `function` is a module-level function of a test module. On every rank the default gloo group exists and
    all generators are seeded; args and results are pickled. The first exception of any rank fails the test
    with that rank's traceback and ends the others.
    """

    def run(function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
        return run_on_ranks(process_server, function, ranks, args, timeout_s)

    return run
