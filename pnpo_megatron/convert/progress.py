"""A progress bar in bytes, on a terminal only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def progress_bar(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to be told of bytes that are done."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn(label), *columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=total_bytes)
        yield lambda count: progress.advance(task, count)
