"""The log of a command: `--log`, else `HEADWATER_LOG`, else the folder `./data`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.model.errors import NoAccess

if TYPE_CHECKING:
    from headwater.log.log import Log

VARIABLE = "HEADWATER_LOG"
FOLDER = "./data"

LogOption = Annotated[
    str | None,
    typer.Option(
        "--log", "-l", metavar="URL", help=f"The log: a folder or a URL. Default: ${VARIABLE}, else {FOLDER}."
    ),
]


def log_url(given: str | None) -> str:
    """The URL of the log that a command uses."""
    return given or os.environ.get(VARIABLE) or FOLDER


def open_existing(given: str | None) -> Log:
    """Opens an existing log; falls back to read-only without write access."""
    from headwater.log.log import open_log

    url = log_url(given)
    try:
        return open_log(url, create=False)
    except NoAccess:
        return open_log(url, create=False, read_only=True)


def open_or_create(given: str | None) -> Log:
    """Opens a log, and creates it if it does not exist."""
    from headwater.log.log import open_log

    return open_log(log_url(given))
