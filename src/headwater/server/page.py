"""The status page of a running application: one page on loopback that refreshes every second.

    GET /               the page
    GET /status.json    the status as `headwater status --json` prints it
    GET /views.json     the first rows of each view: in its own order, or the newest where it has a time, or by key

Nothing can be changed through it. It needs nothing from the network. A request that does not arrive within some seconds is dropped, and
at most `REQUESTS_MAX` connections are served at once: a client that connects and stays silent holds neither threads nor memory.
Thread-safety: `show` may be called by any thread.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from contextlib import suppress
from datetime import date, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa

from headwater.model.errors import HeadwaterError, InvalidInput
from headwater.processing.stages.status import AppStatus, first_status

if TYPE_CHECKING:
    from headwater.app.app import App
    from headwater.views.view import View

PORTS_TRIED = 20
ROWS = 10

REQUEST_S = 5.0
"""How long a browser may take to send a request, and between two of them on one connection."""
REQUESTS_MAX = 32
"""Connections at once; a browser opens six."""

_EXACT_MAX = 2**53  # a browser's numbers lose digits beyond it
_HERE = ("127.0.0.1", "localhost", "::1")


class StatusPage:
    """A server in threads of its own, from the constructor to `close`."""

    def __init__(self, app: App, *, port: int) -> None:
        self._app = app
        self._status = first_status(app.graph, app.log_url)
        self._server = _bound(self, port)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="headwater-page", daemon=True)
        self._thread.start()

    def show(self, status: AppStatus) -> None:
        """What the page shows from now on."""
        self._status = status

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Content type and body of a page; None where there is none."""
        match path.partition("?")[0]:
            case "/":
                return "text/html; charset=utf-8", (resources.files("headwater.server") / "status.html").read_bytes()
            case "/status.json":
                return "application/json", msgspec.json.encode(self._status)
            case "/views.json":
                return "application/json", msgspec.json.encode({name: self._rows(name) for name in self._app.views})
        return None

    def _rows(self, name: str) -> dict[str, Any]:
        try:
            with self._app.views[name] as view:
                rows = view.rows(order=_order(view), limit=ROWS)
        except HeadwaterError as error:
            return {"error": error.what}
        return {
            "columns": rows.column_names,
            "rows": [[_plain(value) for value in row.values()] for row in rows.to_pylist()],
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    page: StatusPage

    def __init__(self, address: tuple[str, int]) -> None:
        self._places = threading.BoundedSemaphore(REQUESTS_MAX)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A connection that finds no place is closed: the page asks again a second later."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke off is no news; anything else is told in one line, not in a traceback over the screen."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logging.getLogger(__name__).warning("A request to the status page failed: %r", error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S

    def handle(self) -> None:
        """One connection; a timer ends it where a request comes byte by byte for ever."""
        timer = threading.Timer(REQUEST_S * 2, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            super().handle()
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        # Another site's name may be made to point at this machine; what it asks for then is not for it.
        if _host(self.headers.get("Host", "")) not in _HERE:
            self._send(403, "text/plain", b"This page is for this machine: open it as 127.0.0.1 or localhost.\n")
            return
        found = self.server.page.answer(self.path)
        kind, body = found or ("text/plain", b"There is no such page.\n")
        self._send(200 if found else 404, kind, body)

    def _send(self, code: int, kind: str, body: bytes) -> None:
        try:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # a browser that has left is no news

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are no news."""


def _host(name: str) -> str | None:
    """The host of a request's header; None where that is none."""
    try:
        return urlsplit(f"//{name}").hostname
    except ValueError:
        return None


def _bound(page: StatusPage, port: int) -> _Server:
    """A server on the port, or on the first free one behind it."""
    for number in range(port, port + PORTS_TRIED):
        try:
            server = _Server(("127.0.0.1", number))
        except (OSError, OverflowError):
            continue
        server.page = page
        return server
    raise InvalidInput(
        f"Ports {port} to {port + PORTS_TRIED - 1} of this machine are all in use.",
        advice="Choose another port with --port, or disable the page with --no-page.",
    )


def _order(view: View) -> list[str] | None:
    """The newest rows first, where a view has no order of its own and its key has a time."""
    definition = view.definition
    if definition.order:
        return None
    times = [name for name in definition.key if pa.types.is_timestamp(definition.schema.field(name).type)]
    return [f"-{name}" for name in times] or None


def _plain(value: Any) -> Any:
    if isinstance(value, (datetime, date)):
        return value.isoformat(sep=" ") if isinstance(value, datetime) else value.isoformat()
    if isinstance(value, int) and abs(value) > _EXACT_MAX:
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
