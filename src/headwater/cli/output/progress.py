"""Progress of a long command: a line on a terminal while it goes on, one line of JSON in a pipe when it has ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headwater.cli.output.rows import is_terminal


class ProgressLine:
    """The line of one command."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None, said="")

    def show(self, said: str, *, done: int | None = None, total: int | None = None) -> None:
        """What to show now; the bar fills where the total is known."""
        self._progress.update(self._task, said=said, completed=done or 0, total=total)


@contextmanager
def progress_line(title: str) -> Iterator[ProgressLine]:
    """A line on stderr where a person looks at it."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[said]}", markup=False, style="cyan"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        yield ProgressLine(progress, title)


def tell_end(sentence: str, facts: dict[str, Any]) -> None:
    """Says how it ended: a sentence for a person, JSON for a program."""
    typer.echo(sentence if is_terminal() else msgspec.json.encode(facts).decode())
