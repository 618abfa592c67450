"""Servers: real services that Headwater is tested with and measured beside, started on loopback in temporary folders."""

from __future__ import annotations

import os
import pwd
from pathlib import Path


class ServerError(RuntimeError):
    """A server could not be fetched, started or kept alive.

    `code` is stable and one of `java_missing`, `maven_missing`, `download_failed`, `port_in_use`,
    `format_failed`, `died`, `not_ready`, `program_missing`, `node_missing`; the text says what to do next.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def cache_folder(name: str) -> Path:
    """Where a set of downloaded files is kept: `$HEADWATER_CACHE`, by default `~/.cache/headwater`, for root `/var/cache/headwater`."""
    own = Path("/var/cache/headwater") if os.geteuid() == 0 else Path.home() / ".cache" / "headwater"
    return Path(os.environ.get("HEADWATER_CACHE") or own) / name


def give_away(folder: Path) -> None:
    """Makes the folder the service's own; the guard runs the service as the folder's owner."""
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        folder.parent.chmod(folder.parent.stat().st_mode | 0o011)  # a temporary folder of root lets nobody through
