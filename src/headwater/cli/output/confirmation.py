"""The confirmation before something is forgotten: asked of a person, and of a program in advance with `--yes`."""

from __future__ import annotations

import sys

import typer

from headwater.cli.output.rows import printable
from headwater.model.errors import InvalidInput


def confirm(question: str, *, yes: bool) -> None:
    """Goes on if the answer is yes; ends the command where it is no, refuses where nobody can answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"This needs a confirmation: {question}", advice="Pass --yes.")
    typer.confirm(printable(question), abort=True)
