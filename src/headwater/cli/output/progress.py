"""Progress of a long command: a live line on a terminal, one line of JSON at the end in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headwater.cli.output.json import json_text
from headwater.cli.output.terminal import is_terminal


class ProgressLine:
    """The progress line of one command."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None, said="")

    def show(self, said: str, *, done: int | None = None, total: int | None = None) -> None:
        """Updates the text, and the bar if the total is known."""
        self._progress.update(self._task, said=said, completed=done or 0, total=total)


@contextmanager
def progress_line(title: str) -> Iterator[ProgressLine]:
    """Shows a progress line on stderr, if stderr is a terminal."""
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
    """Prints the result: a sentence on a terminal, JSON in a pipe."""
    typer.echo(sentence if is_terminal() else json_text(facts))
