"""The confirmation before a command deletes something: a prompt on a terminal, `--yes` in a script."""

from __future__ import annotations

import sys

import typer

from headwater.cli.output.terminal import printable
from headwater.model.errors import InvalidInput


def confirm(question: str, *, yes: bool) -> None:
    """Returns if the answer is yes, and aborts the command if it is no. Refuses without a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(
            f"The command needs a confirmation, but stdin is not a terminal: {question}",
            advice="Pass --yes to confirm.",
        )
    typer.confirm(printable(question), abort=True)
