"""Connections to one PostgreSQL database: by psycopg for statements, by psycopg2 for its stream, by ADBC for bulk.

All three are given the same settings, which decide how PostgreSQL prints values (`postgres.types` reads them). A password comes from the
URL, `?password_env=NAME`, `?password_file=…`, `PGPASSWORD` or `~/.pgpass`, is read anew for each connection (so that it may change), and
never stands in an error. Every failure becomes one of ours by `told`: `Unreachable` where trying again can help, `NotCapturable` where
somebody has to do something first, `CaptureLost` where changes are gone. Not thread-safe: each thread has its own `PostgresDatabase`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any
from urllib.parse import quote

from headwater.capture.source_url import SourceUrl
from headwater.databases.address import SECRETS, load_client
from headwater.databases.failures import in_our_words
from headwater.model.errors import CaptureLost, HeadwaterError, NotCapturable, Unreachable

CONNECT_S = 10
OUR_OPTIONS = (*SECRETS, "slot", "publication")

_SETTINGS = {
    "datestyle": "ISO",
    "intervalstyle": "iso_8601",
    "timezone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
_REFUSED = ("28000", "28P01", "3D000")
_NO_RIGHT = "42501"
_NO_TABLE = "42P01"
_TOO_MANY = "53400"
_LOST = "can no longer "


class PostgresDatabase:
    """One database, and one connection of each kind to it, made when it is first needed and again after it was lost."""

    def __init__(self, url: SourceUrl) -> None:
        self.shown = url.shown
        self._url = url
        self._statements: Any = None
        self._bulk: Any = None

    def another(self) -> PostgresDatabase:
        """The same database by other connections, for another thread."""
        return PostgresDatabase(self._url)

    def ask(self, statement: str, parameters: Any = None) -> list[Any]:
        """The rows that a statement gives, in a transaction of its own."""
        with self.told(), self.statements().cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def statements(self) -> Any:
        """The connection for statements; each is a transaction of its own unless one is begun."""
        if self._statements is None or self._statements.closed:
            psycopg = client("psycopg")
            with self.told():
                self._statements = psycopg.connect(**self._parameters(), autocommit=True)
        return self._statements

    def bulk(self) -> Any:
        """The connection that gives Arrow; each statement is a transaction of its own unless one is begun."""
        if self._bulk is None:
            adbc = client("adbc_driver_postgresql.dbapi")
            with self.told():
                self._bulk = adbc.connect(self._uri(), autocommit=True)
        return self._bulk

    def reader(self, *, lock_timeout_ms: int) -> Any:
        """A new connection that gives Arrow, in transactions, and does not wait long for locks; the caller closes it."""
        adbc = client("adbc_driver_postgresql.dbapi")
        with self.told():
            return adbc.connect(self._uri(lock_timeout_ms))

    def stream(self) -> Any:
        """A new connection that speaks the replication protocol; the caller closes it."""
        psycopg2, extras = client("psycopg2"), client("psycopg2.extras")
        parameters = self._parameters()
        with self.told():
            return psycopg2.connect(**parameters, connection_factory=extras.LogicalReplicationConnection)

    def is_lost(self) -> bool:
        """Whether the server does not answer: the simplest statement fails, too."""
        try:
            self.ask("select 1")
        except HeadwaterError:
            return True
        return False

    def close(self) -> None:
        """Ends both connections; the next call makes them anew."""
        for connection in (self._statements, self._bulk):
            if connection is not None:
                with suppress(Exception):
                    connection.close()
        self._statements = self._bulk = None

    def told(self) -> AbstractContextManager[None]:
        """Turns what the clients raise into our errors; the connections are made anew then."""
        return in_our_words(self._problem, then=self.close)

    def _problem(self, error: Exception) -> HeadwaterError | None:
        if not type(error).__module__.startswith(("psycopg", "adbc_driver")):
            return None
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""
        text = str(error).strip()
        first = self._bare(text.partition("\n")[0].removeprefix("[libpq] ").rstrip("."))
        if _LOST in text and "slot" in text:
            return CaptureLost(
                f"{self.shown}: {first}.",
                advice="The server has removed WAL that the capture needs (max_slot_wal_keep_size). Start the capture with "
                "`--backfill-again`: it copies the tables again.",
            )
        if state == _NO_RIGHT or "permission denied" in text or "must be owner" in text:
            return NotCapturable(
                f"{self.shown}: {first}.", advice="Grant the role the missing privilege, or use another role."
            )
        if state == _NO_TABLE:
            return NotCapturable(
                f"{self.shown}: {first}.",
                advice="The table was dropped or renamed. Leave it out, or use its present name.",
            )
        if state in _REFUSED or "authentication failed" in text or "no pg_hba.conf entry" in text:
            return NotCapturable(
                f"{self.shown}: {first}.",
                advice="Check the role, its password (?password_env=NAME, ?password_file=…, PGPASSWORD, ~/.pgpass), the "
                "name of the database, and the server's pg_hba.conf.",
            )
        if state == _TOO_MANY or "all replication slots are in use" in text:
            return NotCapturable(
                f"{self.shown}: {first}.",
                advice="Drop an unused slot: SELECT pg_drop_replication_slot('…'); or raise the limit and restart the server: "
                "ALTER SYSTEM SET max_replication_slots = 20;",
            )
        return Unreachable(f"{self.shown}: {first}.", advice="Check that the server runs and accepts connections.")

    def _bare(self, text: str) -> str:
        secret = self._url.read_password()
        return text if not secret or secret not in text else "the server is not reachable"

    def _parameters(self, lock_timeout_ms: int = 0) -> dict[str, Any]:
        """What libpq is told, by its own names."""
        url = self._url
        told = {
            "host": url.host or None,
            "port": url.port,
            "user": url.user,
            "dbname": url.path.removeprefix("/") or None,
            "password": url.read_password(),
        }
        parameters = {name: value for name, value in told.items() if value is not None}
        extra = {name: value for name, value in url.options.items() if name not in OUR_OPTIONS}
        settings = " ".join(
            f"-c {name}={value}" for name, value in {**_SETTINGS, "lock_timeout": lock_timeout_ms}.items()
        )
        ours = {"client_encoding": "UTF8", "connect_timeout": CONNECT_S, "application_name": "headwater"}
        return {**ours, **parameters, **extra, "options": f"{extra.get('options', '')} {settings}".strip()}

    def _uri(self, lock_timeout_ms: int = 0) -> str:
        parameters = self._parameters(lock_timeout_ms)
        return "postgresql:///?" + "&".join(
            f"{name}={quote(str(value), safe='')}" for name, value in parameters.items()
        )


def client(module: str) -> Any:
    """A client library, loaded when it is needed."""
    return load_client(module, extra="postgres", purpose="Capturing PostgreSQL")


def literal(text: str) -> str:
    """A text in SQL, whatever characters it has."""
    return (
        "'" + text.replace("'", "''") + "'"
        if "\\" not in text
        else " E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
    )
