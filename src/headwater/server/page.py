"""The status page of a running application: one page on loopback, drawn anew every second.

    GET /               the page
    GET /status.json    the status as `headwater status --json` prints it
    GET /views.json     the first rows of each view

Nothing can be changed through it. It needs nothing from the network. Thread-safety: `show` may be called by any thread.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.model.errors import HeadwaterError, InvalidInput

if TYPE_CHECKING:
    from headwater.app import App
    from headwater.processing.status import AppStatus

PORTS_TRIED = 20
ROWS = 10


class StatusPage:
    """A server in threads of its own, from the constructor to `close`."""

    def __init__(self, app: App, *, port: int) -> None:
        self._app = app
        self._status: AppStatus | None = None
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
                return "application/json", msgspec.json.encode(self._views())
        return None

    def _views(self) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for name in self._app.views:
            try:
                with self._app.views[name] as view:
                    rows = view.rows(limit=ROWS)
                shown[name] = {
                    "columns": rows.column_names,
                    "rows": [list(map(_plain, row.values())) for row in rows.to_pylist()],
                }
            except HeadwaterError as error:
                shown[name] = {"error": error.what}
        return shown


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    page: StatusPage


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        found = self.server.page.answer(self.path)
        kind, body = found or ("text/plain", b"There is no such page.\n")
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are no news."""


def _bound(page: StatusPage, port: int) -> _Server:
    """A server on the port, or on the first free one behind it."""
    for number in range(port, port + PORTS_TRIED):
        try:
            server = _Server(("127.0.0.1", number), _Handler)
        except (OSError, OverflowError):
            continue
        server.page = page
        return server
    raise InvalidInput(
        f"Ports {port} to {port + PORTS_TRIED - 1} of this machine are all taken.",
        advice="Choose another with --port, or leave the page out with --no-page.",
    )


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
