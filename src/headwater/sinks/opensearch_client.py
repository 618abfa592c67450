"""OpenSearch over HTTP: requests with JSON, a bounded number of attempts while the server says "not now", its errors in our words.

What a server that is busy refuses (429, 502, 503, 504) gets the request again after a back-off, at most `ATTEMPTS_MAX` times in all, and
is `Unreachable` then; in a bulk request that goes for each of its items. A request whose answer is lost may have been carried out:
whoever sends it has to be able to send it again.

Thread-safety: one thread at a time.
"""

from __future__ import annotations

import http.client
import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from headwater.model.backoff import Backoff
from headwater.model.errors import InvalidInput, NoAccess, Unreachable

ATTEMPTS_MAX = 6
TIMEOUT_S = 60.0
BULK_BYTES_MAX = 8 << 20
BULK_ROWS_MAX = 4_000

RETRY_S = (0.1, 1.6)
"""The first and the longest pause before a busy server gets a request again."""

_NOT_NOW = (429, 502, 503, 504)


class Answer(msgspec.Struct, frozen=True):
    """What the server said."""

    status: int
    body: Any


class Action(msgspec.Struct, frozen=True):
    """One item of a bulk request: its line, and the document where it has one."""

    line: str
    document: str | None = None

    @property
    def size(self) -> int:
        """About how many bytes it is."""
        return len(self.line) + len(self.document or "")


class OpenSearchClient:
    """One server, by one connection that is kept."""

    def __init__(
        self,
        address: str,
        *,
        shown: str,
        password: str | None = None,
        ca_file: str | None = None,
        backoff: Callable[[], Backoff] = lambda: Backoff(*RETRY_S),
    ) -> None:
        """`address` begins with `http://` or `https://`; its path does not matter."""
        parts = urlsplit(address)
        self._shown = shown
        self._host, self._port = parts.hostname or "localhost", parts.port or 9200
        self._context = _context(ca_file, shown) if parts.scheme == "https" else None
        self._headers = {"Accept": "application/json"}
        secret = password if password is not None else unquote(parts.password or "")
        if parts.username:
            pair = f"{unquote(parts.username)}:{secret}".encode()
            self._headers["Authorization"] = f"Basic {b64encode(pair).decode()}"
        self._connection: http.client.HTTPConnection | None = None
        self._backoff = backoff

    def ask(self, method: str, path: str, body: Any = None, *, allows: Sequence[int] = ()) -> Answer:
        """Sends a request; an answer that is no success and not among `allows` is raised."""
        data = None if body is None else msgspec.json.encode(body)
        answer = self._sent(method, path, data, "application/json")
        if answer.status >= 300 and answer.status not in allows:
            raise self.error_of(answer)
        return answer

    def bulk(self, actions: Sequence[Action], refused: Callable[[int, int, str], None]) -> None:
        """Carries out actions; `refused(index, status, reason)` is told those that the server does not take."""
        for start, end in _portions(actions):
            waiting, backoff = list(range(start, end)), self._backoff()
            for attempt in range(ATTEMPTS_MAX):
                busy = self._bulk(actions, waiting, refused)
                if not busy:
                    break
                if attempt == ATTEMPTS_MAX - 1:
                    raise Unreachable(
                        f"{self._shown}: The server is too busy for {len(busy):,} documents.",
                        advice="The sink retries the documents. Check the load of the server.",
                    )
                backoff.sleep()
                waiting = busy

    def error_of(self, answer: Answer) -> Exception:
        """What an answer that is no success means."""
        said = f"{self._shown}: {reason_of(answer.body)}"
        if answer.status in (401, 403):
            return NoAccess(said, advice="Pass a user and a password (?password_env=) with the permission to write.")
        if answer.status in _NOT_NOW or answer.status >= 500:
            return Unreachable(said, advice="The sink retries the request. Check the log of the server.")
        return InvalidInput(said, advice="Correct the index, or the rows of the stage.")

    def close(self) -> None:
        """Ends the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _bulk(
        self, actions: Sequence[Action], waiting: Sequence[int], refused: Callable[[int, int, str], None]
    ) -> list[int]:
        """One request; the actions to be asked again."""
        lines = (line for at in waiting for line in (actions[at].line, actions[at].document) if line is not None)
        answer = self._sent("POST", "/_bulk", ("\n".join(lines) + "\n").encode(), "application/x-ndjson")
        if answer.status >= 300:
            raise self.error_of(answer)
        busy = []
        for at, item in zip(waiting, answer.body["items"], strict=True):
            ((_, one),) = item.items()
            if one["status"] in _NOT_NOW:
                busy.append(at)
            elif "error" in one:
                refused(at, one["status"], reason_of({"error": one["error"]}))
        return busy

    def _sent(self, method: str, path: str, data: bytes | None, kind: str) -> Answer:
        backoff = self._backoff()
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                backoff.sleep()
            answer = self._once(method, path, data, kind)
            if answer.status not in _NOT_NOW:
                break
        return answer

    def _once(self, method: str, path: str, data: bytes | None, kind: str) -> Answer:
        headers = self._headers if data is None else {**self._headers, "Content-Type": kind}
        is_new = self._connection is None
        try:
            connection = self._connected()
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not is_new and isinstance(error, (http.client.RemoteDisconnected, ConnectionError)):
                return self._once(method, path, data, kind)  # a server ends connections that nobody used for a while
            raise Unreachable(
                f"{self._shown}: {str(error) or type(error).__name__}.", advice="Check the URL and the server."
            ) from None
        try:
            return Answer(response.status, msgspec.json.decode(text) if text else {})
        except msgspec.DecodeError:
            return Answer(response.status, {"error": text[:200].decode(errors="replace")})

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            if self._context is None:
                self._connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
            else:
                self._connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=TIMEOUT_S, context=self._context
                )
        return self._connection


def _context(ca_file: str | None, shown: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise InvalidInput(
            f"{shown}: The ca_file {ca_file} is not readable ({error}).", advice="Pass a PEM file."
        ) from None


def reason_of(body: Any) -> str:
    """What an answer says went wrong."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return str(error)
    cause = error.get("caused_by", {}).get("reason")
    return f"{error.get('type')}: {error.get('reason')}" + (f" ({cause})" if cause else "")


def path_of(*parts: str) -> str:
    """A path whose parts may have any character."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)


def _portions(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """Ranges of actions of a bounded size."""
    start = size = 0
    for at, action in enumerate(actions):
        if at > start and (size + action.size > BULK_BYTES_MAX or at - start >= BULK_ROWS_MAX):
            yield start, at
            start, size = at, 0
        size += action.size
    if start < len(actions):
        yield start, len(actions)
