"""PostgreSQL from Debian's packages: one server in a temporary folder, on a free port of loopback.

    with PostgresServer() as postgres:
        open_view_store(postgres.url)

It refuses to run as root, so its files are made and served by the owner of the folder. The role `postgres` has no password and is
taken from loopback only.
"""

from __future__ import annotations

import shlex
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from headwater.testing.servers.debian import PackagedServer

# What the start-up packet of the protocol says: its length, version 3.0, and whom to let in.
_HELLO = b"user\0postgres\0database\0postgres\0\0"


class PostgresServer(PackagedServer):
    """A new database cluster, without syncs: it is thrown away."""

    program = "postgres"
    package = "postgresql"
    also_in = tuple(f"/usr/lib/postgresql/{version}/bin" for version in range(20, 13, -1))

    def __init__(self, *, settings: Mapping[str, str] | None = None, parent_folder: Path | None = None) -> None:
        """`settings` are laid over ours."""
        super().__init__(parent_folder=parent_folder)
        self._settings = dict(settings or {})

    @property
    def url(self) -> str:
        """Where it is."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def command(self, program: str, folder: Path, port: int) -> list[str]:
        """Makes the cluster if there is none, then becomes the server."""
        binaries = Path(program).resolve().parent
        data = folder / "data"
        make = [str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync"]
        make += ["--locale=C.UTF-8"]
        serve = [str(binaries / "postgres"), "-D", str(data), "-p", str(port), "-h", "127.0.0.1"]
        settings = {"fsync": "off", "unix_socket_directories": str(folder), "max_connections": "50", **self._settings}
        serve += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        once = f"{{ test -d {shlex.quote(str(data))} || {shlex.join(make)}; }}"
        return ["sh", "-c", f"{once} && exec {shlex.join(serve)}"]

    def is_ready(self) -> bool:
        """Whether it lets somebody in; it takes connections a while before that."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(struct.pack("!II", len(_HELLO) + 8, 3 << 16) + _HELLO)
                return connection.recv(1) == b"R"
        except OSError:
            return False
