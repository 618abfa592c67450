"""A relay before a server: while it is cut nobody listens at its port, though the server runs on with all that it has."""

from __future__ import annotations

import socket
import threading
from typing import Self

from headwater.testing.servers.server import free_port


class Relay:
    """Passes connections on to a port of this machine, until it is cut."""

    def __init__(self, to: int) -> None:
        self._to, self.port = to, free_port()
        self._open: list[socket.socket] = []
        self._gate = threading.Lock()

    def __enter__(self) -> Self:
        self.mend()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def mend(self) -> None:
        """Listens, again at the same port."""
        listening = socket.create_server(("127.0.0.1", self.port))
        self._open.append(listening)
        threading.Thread(target=self._listen, args=(listening,), daemon=True).start()

    def cut(self) -> None:
        """Ends every connection, and takes no more."""
        with self._gate:
            for each in self._open:
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the other side was first
                each.close()
            self._open.clear()

    def _listen(self, listening: socket.socket) -> None:
        while True:
            try:
                asking, _ = listening.accept()
                serving = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            with self._gate:
                self._open += [asking, serving]
            for one, other in ((asking, serving), (serving, asking)):
                threading.Thread(target=_pass, args=(one, other), daemon=True).start()


def _pass(one: socket.socket, other: socket.socket) -> None:
    try:
        while piece := one.recv(1 << 16):
            other.sendall(piece)
        other.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it was cut, or one of the two has ended
