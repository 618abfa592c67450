"""Requests to one database of CouchDB, by the standard library's HTTP client, and the bell: a longpoll request that only rings.

One connection is kept for requests, made anew once where the server had closed it. A password is read anew for each request and never
stands in an error. Every failure is one of ours: `Unreachable` where trying again can help, `NotFound` and `NotCapturable` where
somebody has to do something first. Not thread-safe.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode

from headwater.capture.documents import json_text
from headwater.capture.source import is_readable
from headwater.capture.source_url import SourceUrl
from headwater.model.errors import HeadwaterError, InvalidInput, NotCapturable, NotFound, Unreachable

TIMEOUT_S = 60.0
PORT, PORT_TLS = 5984, 6984
BELL_S = 30.0
"""How long one request waits to ring."""

_ROW = b'"seq"'
"""What a longpoll answer has once something has changed; one that has timed out has only `"last_seq"`."""


class Couch:
    """One database; see the module."""

    def __init__(self, url: SourceUrl) -> None:
        self._url = url
        self._database = url.path.strip("/")
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, path: str, **query: Any) -> Any:
        """What the database says; `NotFound`."""
        return self._ask("GET", path, query)

    def find(self, path: str) -> Any | None:
        """What the database says, or None where it has no such thing."""
        try:
            return self._ask("GET", path, {})
        except NotFound:
            self._ask("GET", "", {})  # not the database itself, which is an error
            return None

    def post(self, path: str, asked: Any, **query: Any) -> Any:
        """What the database says to a question that is too long for a URL."""
        return self._ask("POST", path, query, json_text(asked))

    def put(self, path: str, document: Any) -> None:
        """Writes a document."""
        self._ask("PUT", path, {}, json_text(document))

    def delete(self, path: str, rev: str) -> None:
        """Removes a document."""
        self._ask("DELETE", path, {"rev": rev})

    def open_longpoll(self, since: Any) -> http.client.HTTPConnection:
        """A connection of its own, on which the server will say when something comes behind `since`."""
        connection = self._connect()
        query = {"since": since, "feed": "longpoll", "limit": 1, "timeout": int(BELL_S * 1000), "heartbeat": 10_000}
        try:
            connection.request("GET", self._target("_changes", query), headers=self._headers())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._unreachable(error) from None
        return connection

    def close(self) -> None:
        """Ends the connection; the next request makes one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # Parts of a request

    def _ask(self, method: str, path: str, query: Mapping[str, Any], body: str | None = None) -> Any:
        was_open = self._connection is not None
        try:
            status, raw = self._send(method, path, query, body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not was_open:
                raise self._unreachable(error) from None
            return self._ask(method, path, query, body)  # a connection that was kept may have been closed by the server
        try:
            told = json.loads(raw)
        except ValueError:
            raise Unreachable(
                f"{self._url.shown}: The server is not a CouchDB (status {status}).",
                advice="Check the host and the port.",
            ) from None
        if status >= 400:
            raise self._problem(status, told)
        return told

    def _send(self, method: str, path: str, query: Mapping[str, Any], body: str | None) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = self._connect()
        data = None if body is None else body.encode("utf-8")
        self._connection.request(method, self._target(path, query), body=data, headers=self._headers())
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def _connect(self) -> http.client.HTTPConnection:
        if self._url.scheme == "couchdbs":
            return http.client.HTTPSConnection(
                self._url.host, self._url.port or PORT_TLS, timeout=TIMEOUT_S, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self._url.host, self._url.port or PORT, timeout=TIMEOUT_S)

    def _target(self, path: str, query: Mapping[str, Any]) -> str:
        told = {name: json_text(value) if isinstance(value, bool) else value for name, value in query.items()}
        target = f"/{quote(self._database, safe='')}" + (f"/{path}" if path else "")
        return target + (f"?{urlencode(told)}" if told else "")

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        user = self._url.user
        if user is not None:
            token = base64.b64encode(f"{user}:{self._url.read_password() or ''}".encode()).decode("ascii")
            headers["Authorization"] = f"Basic {token}"
        return headers

    def _unreachable(self, error: Exception) -> HeadwaterError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return InvalidInput(
                f"{self._url.shown}: The certificate of the server is not trusted ({error.verify_message}).",
                advice="Set the file of the certificate authority: export SSL_CERT_FILE=….",
            )
        what = getattr(error, "strerror", None) or type(error).__name__
        return Unreachable(f"{self._url.shown}: {what}.", advice="Check that the server runs and accepts connections.")

    def _problem(self, status: int, told: Any) -> HeadwaterError:
        shown = self._url.shown
        why = told.get("reason") or told.get("error") or f"status {status}" if isinstance(told, dict) else str(status)
        if status == 401:
            return NotCapturable(
                f"{shown}: {why}", advice="Check the user and the password (?password_env=NAME or ?password_file=…)."
            )
        if status == 403:
            return NotCapturable(
                f"{shown}: {why}", advice=f"Make the user a member of the database: PUT /{self._database}/_security."
            )
        if status == 404:
            return NotFound(
                f"{shown}: The database or document does not exist ({why}).",
                advice=f"Use an existing database, or create it with `curl -X PUT …/{self._database}`.",
            )
        if status >= 500 or status == 429:
            return Unreachable(f"{shown}: {why} (status {status}).", advice="Check the log of the server for details.")
        return NotCapturable(
            f"{shown}: {why} (status {status}).", advice="Check that the server is CouchDB 2.0 or newer."
        )


class Bell:
    """Rings when something comes behind where it was hung up; what it rings for has to be asked for."""

    def __init__(self, couch: Couch) -> None:
        self._couch = couch
        self._connection: http.client.HTTPConnection | None = None
        self._since: Any = None
        self._heard = b""
        self._until = 0.0

    def hangs(self, since: Any) -> bool:
        """Whether it hangs there."""
        return self._connection is not None and self._since == since

    def hang(self, since: Any) -> None:
        """Hangs it up."""
        self.take_down()
        self._connection = self._couch.open_longpoll(since)
        self._since, self._until = since, time.monotonic() + BELL_S

    def rings(self, timeout_s: float) -> bool:
        """Waits so long; True too where it has hung long enough, or its server is gone, so that somebody looks."""
        assert self._connection is not None
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = min(deadline, self._until) - time.monotonic()
            if not is_readable(self._connection.sock, left_s):
                if time.monotonic() < self._until:
                    return False
                break
            if self._hear():
                break
        self.take_down()
        return True

    def take_down(self) -> None:
        """Ends its request."""
        connection, self._connection, self._heard = self._connection, None, b""
        if connection is not None:
            with suppress(OSError):
                connection.close()

    def _hear(self) -> bool:
        """Takes what has come; whether it says anything, or is the end."""
        assert self._connection is not None
        sock = self._connection.sock
        sock.setblocking(False)
        with suppress(BlockingIOError, ssl.SSLWantReadError):
            while True:
                try:
                    piece = sock.recv(65_536)
                except (BlockingIOError, ssl.SSLWantReadError):
                    raise
                except OSError:
                    return True
                if not piece:
                    return True
                self._heard = self._heard[-len(_ROW) :] + piece
                if _ROW in self._heard or b"last_seq" in self._heard:
                    return True
        return False
