"""MariaDB from Debian's packages: one server in a temporary folder, on a free port of loopback.

    with MariaDbServer() as mariadb:
        pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root")

Its files are made and served by the owner of the folder. The user `root` has no password and is taken from loopback only.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

from headwater.testing.servers.debian import PackagedServer

PROTOCOL = 10
"""What a server that is ready says first; one that is not says 255, an error."""

_GREETING_AT = 4


class MariaDbServer(PackagedServer):
    """A new server with a row binlog, without syncs: it is thrown away."""

    program = "mariadbd"
    package = "mariadb-server"
    also_in = ("/usr/sbin",)

    def __init__(self, *, settings: Mapping[str, str] | None = None, parent_folder: Path | None = None) -> None:
        """`settings` are laid over ours; an empty one is left out."""
        super().__init__(parent_folder=parent_folder)
        self._settings = dict(settings or {})

    @property
    def url(self) -> str:
        """Where it is; the database `mysql` is the one that is always there."""
        return f"mariadb://root@127.0.0.1:{self.port}/mysql"

    def command(self, program: str, folder: Path, port: int) -> list[str]:
        """Makes the system tables if there are none, then becomes the server."""
        data = folder / "data"
        scratch = folder / "tmp"  # a server that starts removes what others have in a folder that they share
        make = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal"]
        make += ["--skip-test-db", "--skip-name-resolve", f"--tmpdir={scratch}"]
        settings = {
            "datadir": str(data),
            "tmpdir": str(scratch),
            "port": str(port),
            "bind-address": "127.0.0.1",
            "socket": str(folder / "socket"),
            "pid-file": str(folder / "pid"),
            "skip-name-resolve": "1",
            "server-id": "1",
            "log-bin": "binlog",
            "binlog-format": "ROW",
            "binlog-row-metadata": "FULL",
            "sync-binlog": "0",
            "innodb-flush-log-at-trx-commit": "2",
            "innodb-buffer-pool-size": "64M",
            **self._settings,
        }
        serve = [program, "--no-defaults", *(f"--{name}={value}" for name, value in settings.items() if value)]
        folders = shlex.join(["mkdir", "-p", str(scratch)])
        once = f"{folders} && {{ test -d {shlex.quote(str(data / 'mysql'))} || {shlex.join(make)}; }}"
        return ["sh", "-c", f"{once} && exec {shlex.join(serve)}"]

    def is_ready(self) -> bool:
        """Whether it greets."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                return connection.recv(_GREETING_AT + 1)[_GREETING_AT:] == bytes([PROTOCOL])
        except OSError:
            return False
