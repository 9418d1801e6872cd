"""Files that are on the disk whole, or not there."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def sync_path(path: Path) -> None:
    """Force a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, force it to disk, and give it the name."""
    staged = path.with_name(path.name + ".tmp")
    write(staged)
    sync_path(staged)
    os.replace(staged, path)


def write_text_whole(path: Path, text: str) -> None:
    """`write_whole` of UTF-8 text."""
    write_whole(path, lambda staged: staged.write_text(text, encoding="utf-8"))


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether this process could take the lock of a file or folder; a process that dies frees its own."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # NFS wants files writable
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)
