"""A server that speaks CouchDB's protocol: pouchdb-server from npm, since Debian has no CouchDB any more.

    with CouchServer() as couch:
        open_source(f"couchdb://127.0.0.1:{couch.port}/shop")

Its databases lie in the temporary folder and outlive a kill. With `password`, the administrator `admin` has it, and nobody else is let in.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

from headwater.testing.servers import npm
from headwater.testing.servers.server import Server, free_port

PACKAGE, VERSION = "pouchdb-server", "4.2.0"


class CouchServer(Server):
    """One PouchDB server."""

    name = "couchdb"

    def __init__(self, *, password: str | None = None, parent_folder: Path | None = None) -> None:
        super().__init__(parent_folder=parent_folder)
        self._password = password
        self.port = 0

    def start(self) -> None:
        """Fetches the package if needed, and starts the server in a new folder."""
        node, package = npm.find_node(), npm.fetch_package(PACKAGE, VERSION)
        self.port = free_port()
        folder = self._new_folder()
        (folder / "data").mkdir(mode=0o777)
        (folder / "data").chmod(0o777)
        settings: dict[str, object] = {"log": {"level": "none"}}
        if self._password is not None:
            settings |= {"admins": {"admin": self._password}, "couch_httpd_auth": {"require_valid_user": True}}
        config = folder / "config.json"
        config.write_text(json.dumps(settings))
        config.chmod(0o666)
        where = [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--dir",
            str(folder / "data"),
            "--config",
            str(config),
        ]
        try:
            self._run([node, str(package / "bin" / "pouchdb-server"), *where, "--no-stdout-logs"])
        except BaseException:
            self.stop()
            raise

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                return connection.recv(5) == b"HTTP/"
        except OSError:
            return False
