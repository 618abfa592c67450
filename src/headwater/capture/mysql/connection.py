"""Connections to one MariaDB or MySQL database, by PyMySQL.

A session of ours prints times in UTC, takes part in no default that changes values, and waits for no lock longer than a moment. A password
comes from the URL, `?password_env=NAME` or `?password_file=…`, is read anew for each connection (so that it may change), and never stands
in an error. Every failure becomes one of ours by `told`: `Unreachable` where trying again can help, `NotCapturable` where somebody has to
do something first, `CaptureLost` where changes are gone. Not thread-safe: each thread has its own `MySqlDatabase`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

from headwater.capture.source_url import SourceUrl
from headwater.databases.address import load_client
from headwater.databases.failures import in_our_words
from headwater.model.errors import CaptureLost, HeadwaterError, InvalidInput, NotCapturable, Unreachable, Unsupported

CONNECT_S = 10
ANSWER_S = 600
PORT = 3306
LOCK_WAIT_S = 5

_SETTINGS = (
    "SET NAMES utf8mb4",
    "SET SESSION time_zone = '+00:00', sql_mode = '', autocommit = 1, "
    f"lock_wait_timeout = {LOCK_WAIT_S}, net_write_timeout = {ANSWER_S}, wait_timeout = 28800",
)
_REFUSED = (1044, 1045, 1049, 1130, 1251, 1698)
_NO_RIGHT = (1142, 1143, 1227, 1370)
_NO_TABLE = 1146
_NO_BINLOG = 1236
_OPTIONS = ("password", "password_env", "password_file", "ssl_ca", "ssl_cert", "ssl_key")


class MySqlDatabase:
    """One database, and one connection to it, made when it is first needed and again after it was lost."""

    def __init__(self, url: SourceUrl) -> None:
        unknown = [name for name in url.options if name not in _OPTIONS]
        if unknown:
            raise InvalidInput(
                f"{url.shown}: The option {unknown[0]!r} is unknown.",
                advice=f"The known options are: {', '.join(_OPTIONS)}.",
            )
        self.shown = url.shown
        self.name = url.path.removeprefix("/")
        if not self.name:
            raise InvalidInput(f"{url.shown} has no database.", advice="Use mariadb://user@host:3306/shop.")
        self._url = url
        self._connection: Any = None

    def ask(self, statement: str, parameters: Any = None) -> list[Any]:
        """The rows that a statement gives, in a transaction of its own unless one is begun."""
        with self.told(), self.connection().cursor() as cursor:
            cursor.execute(statement, parameters)
            return list(cursor.fetchall())

    def variables(self, *names: str) -> dict[str, str]:
        """Some of the server's global settings, in lower case; those that it does not know are left out."""
        listed = ", ".join(f"'{name}'" for name in names)
        found = self.ask(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({listed})")
        return {name.lower(): value for name, value in found}

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, with whatever was begun on it."""
        return self._connection is not None

    def connection(self) -> Any:
        """The connection for statements."""
        if self._connection is None:
            self._connection = self.connect()
        return self._connection

    def connect(self) -> Any:
        """A new connection; the caller closes it."""
        client = load_client("pymysql", extra="mysql", purpose="A capture of MariaDB or MySQL")
        url, options = self._url, self._url.options
        files = {
            name.removeprefix("ssl_"): options[name] for name in ("ssl_ca", "ssl_cert", "ssl_key") if name in options
        }
        password = url.read_password()
        with self.told():
            connection = client.connect(
                host=url.host or "127.0.0.1",
                port=url.port or PORT,
                user=url.user or "root",
                password=password or "",
                database=self.name,
                charset="utf8mb4",
                connect_timeout=CONNECT_S,
                read_timeout=ANSWER_S,
                autocommit=True,
                ssl=files or None,
                program_name="headwater",
            )
            with connection.cursor() as cursor:
                for statement in _SETTINGS:
                    cursor.execute(statement)
        return connection

    def close(self) -> None:
        """Ends the connection; the next call makes it anew."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.close()

    def told(self) -> AbstractContextManager[None]:
        """Turns what the client raises into our errors; the connection is made anew then."""
        return in_our_words(self._problem, then=self.close)

    def _problem(self, error: Exception) -> HeadwaterError | None:
        if isinstance(error, RuntimeError) and "cryptography" in str(error):
            return Unsupported(
                f"{self.shown}: Without TLS this user's password needs RSA encryption, and the package cryptography is not installed.",
                advice="Run: pip install cryptography. Or use TLS with ?ssl_ca=….",
            )
        if not type(error).__module__.startswith("pymysql") and not isinstance(error, OSError):
            return None
        number, text = (*error.args, "", "")[:2]
        return self.problem(number if isinstance(number, int) else 0, str(text or error))

    def problem(self, number: int, text: str) -> HeadwaterError:
        """What an error of the server means to us."""
        secret = self._url.read_password()
        said = "the server refused the request" if secret and secret in text else text.strip().rstrip(".")
        what = f"{self.shown}: {said}."
        if number == _NO_BINLOG:
            return CaptureLost(
                what,
                advice="The server has removed binlogs that the capture needs (binlog_expire_logs_seconds). Start the "
                "capture with `--backfill-again`: it copies the tables again.",
            )
        if number in _REFUSED:
            return NotCapturable(
                what,
                advice="Check the user, its password (?password_env=NAME, ?password_file=…), its allowed hosts, and the "
                "name of the database.",
            )
        if number in _NO_RIGHT:
            return NotCapturable(what, advice=f"Grant the user the missing privileges: {grants(self)}")
        if number == _NO_TABLE:
            return NotCapturable(
                what, advice="The table was dropped or renamed. Leave it out, or use its present name."
            )
        return Unreachable(what, advice="Check that the server runs and accepts connections.")


def grants(database: MySqlDatabase, user: str = "…") -> str:
    """The statements that let a user capture a database."""
    return (
        f"GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO {user}; "
        f"GRANT SELECT ON {quoted(database.name)}.* TO {user};"
    )


def quoted(name: str) -> str:
    """An SQL name, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"
