"""Responses of an evaluation that is not finished: kept as they come, so that a killed one goes on."""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pnpo_megatron.errors import ConfigError
from pnpo_megatron.eval.benchmarks import Benchmark
from pnpo_megatron.types import Prompt, Rollout, RolloutGroup

SPOTS, SPOT_BYTES = 16, 1 << 16
SYNC_S = 1.0


class Progress:
    """One line a sampled problem, behind a first line that says what was asked for.

    Grades are not kept: a resumed evaluation grades all responses again, with the grader of that day.
    """

    def __init__(self, path: Path, request: Mapping[str, Any], *, restart: bool = False) -> None:
        """Read what an earlier attempt left behind; a line cut short by a kill is dropped.

        Args:
            request: everything the responses depend on (weights, problems, sampling, seed).
            restart: throw away the responses to another request, instead of refusing.

        Raises:
            ConfigError: the file holds responses to another request.
        """
        self.path, self._next_sync = path, 0.0
        self._lines: dict[tuple[str, str], dict[str, Any]] = {}
        head = json.loads(json.dumps(request))
        whole = _whole_lines(path)
        if whole and (found := json.loads(whole[0])) != head:
            if not restart:
                raise ConfigError(
                    f"{path}: a half-done evaluation of {changed(found, head)}; choose another --out, or "
                    "pass --overwrite"
                )
            whole = []
        for row in map(json.loads, whole[1:]):
            self._lines[row["benchmark"], row["problem"]] = row
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(sum(map(len, whole)))
        if not whole:
            self._write(head)

    def __len__(self) -> int:
        return len(self._lines)

    def groups(self, benchmark: Benchmark) -> dict[str, RolloutGroup]:
        """What is there of one benchmark, by problem id."""
        return {
            problem.id: _group(problem, self._lines[benchmark.name, problem.id])
            for problem in benchmark.problems
            if (benchmark.name, problem.id) in self._lines
        }

    def add(self, benchmark: str, group: RolloutGroup) -> None:
        """Put all responses to one problem on disk."""
        samples = [
            {"sample": r.sample, "seed": r.seed, "version": r.version, "finish_reason": r.finish_reason,
             "ids": r.response_ids.tolist(), "text": r.text} for r in group.rollouts
        ]  # fmt: skip
        self._write({"benchmark": benchmark, "problem": group.prompt.id, "samples": samples})

    def finish(self) -> None:
        """The result is written: the responses stand there."""
        self.path.unlink()

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            file.flush()
            if time.monotonic() >= self._next_sync:  # a killed process loses nothing, a power cut a second
                os.fsync(file.fileno())
                self._next_sync = time.monotonic() + SYNC_S


def _whole_lines(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def _group(problem: Prompt, line: Mapping[str, Any]) -> RolloutGroup:
    return RolloutGroup(
        problem,
        tuple(
            Rollout(torch.tensor(row["ids"], dtype=torch.int64), torch.zeros(len(row["ids"])),
                    row["finish_reason"], row["sample"], row["seed"], row["version"], row["text"])
            for row in line["samples"]
        ),
    )  # fmt: skip


def changed(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Which parts of a request differ, in words."""
    keys = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
    return ", ".join(f"{key} = {found.get(key)!r} (now {wanted.get(key)!r})" for key in keys)


def problems_digest(benchmark: Benchmark) -> str:
    """Names a benchmark's problems: ids, tokens (so the template too) and golds."""
    parts = repr([(p.id, p.token_ids, p.answer) for p in benchmark.problems])
    return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()


def folder_digest(folder: Path) -> str:
    """Names a checkpoint by the sizes of its files and by pieces of their bytes; any training step shows."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}:{size}".encode())
        with path.open("rb") as file:
            for spot in range(SPOTS if size > SPOT_BYTES else 1):
                file.seek(size * spot // SPOTS)
                digest.update(file.read(SPOT_BYTES))
    return digest.hexdigest()
