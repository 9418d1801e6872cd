"""A list of files with sizes and checksums: a folder that has one was written to its end, and damage is found
before anything in it is read."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from pnpo_megatron.durable import sync_path

MANIFEST_FILE = "manifest.json"
Digest = tuple[int, str]
"""Bytes and SHA-256."""


def digest(path: Path) -> Digest:
    """Size and checksum of a file's content."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), checksum


class Follower:
    """Hashes a growing file, and has it flushed to disk, behind its writer: work for another core."""

    STEP = 128 * 2**20

    def __init__(self, path: Path) -> None:
        self._file, self._checksum = path.open("rb", buffering=0), hashlib.sha256()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="follower")
        self._asked, self._reads = 0, list[Future[None]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._beside.shutdown(cancel_futures=True)
        self._file.close()

    def reached(self, size: int) -> None:
        """So many bytes are final."""
        if size - self._asked >= self.STEP:
            self._follow(size)

    def digest(self, size: int) -> Digest:
        """Of the whole file, of that many bytes."""
        self._follow(size)
        for read in self._reads:
            read.result()  # raises what went wrong there
        return size, self._checksum.hexdigest()

    def _follow(self, size: int) -> None:
        self._reads.append(self._beside.submit(self._read, size - self._asked))
        self._asked = size

    def _read(self, count: int) -> None:
        os.fdatasync(self._file.fileno())
        while part := self._file.read(min(2**20, count)):
            self._checksum.update(part)
            count -= len(part)


def write_manifest(folder: Path, digests: Mapping[str, Digest]) -> None:
    """List files by their path in `folder`, and see that the list is on the disk."""
    (folder / MANIFEST_FILE).write_text(_render(digests), encoding="utf-8")
    sync_path(folder / MANIFEST_FILE)


def damage(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with a folder: one sentence a file, none if it is as it was written.

    Args:
        part, parts: check one share of the files only, so that ranks divide the reading.
    """
    listed = _read(folder)
    if isinstance(listed, str):
        return [listed]
    found = []
    for name in sorted(listed)[part::parts]:
        size, checksum = listed[name]
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != size:
            found.append(f"{name} has {path.stat().st_size} bytes, {size} were written")
        elif digest(path)[1] != checksum:
            found.append(f"the content of {name} changed after it was written")
    return found


def _read(folder: Path) -> dict[str, Digest] | str:
    """The list, or what is wrong with it."""
    try:
        text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
        listed: dict[str, Digest] = {name: tuple(entry) for name, entry in json.loads(text)["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"{MANIFEST_FILE} cannot be read"
    return listed if text == _render(listed) else f"the content of {MANIFEST_FILE} changed"


def _render(digests: Mapping[str, Digest]) -> str:
    """With a checksum of its own, so that a changed list does not accuse the files."""
    files = {name: list(digests[name]) for name in sorted(digests)}
    own = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return json.dumps({"sha256": own, "files": files}, indent=1) + "\n"
