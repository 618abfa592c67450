"""What a MariaDB or MySQL server must allow before one of its databases is captured, each with the statement that allows it.

Nothing is made or changed, here or later: a capture reads the binlog that the server writes anyway. The order is that in which somebody
would set it up: the server's settings, then the user's rights.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from headwater.capture.mysql.connection import MySqlDatabase, grants, quoted
from headwater.capture.mysql.tables import MyTable
from headwater.model.errors import HeadwaterError, NotCapturable

_WANTED = {
    "binlog_format": ("ROW", "records statements, not changed rows"),
    "binlog_row_image": ("FULL", "omits unchanged columns"),
    "binlog_row_metadata": ("FULL", "omits the column names, so the capture could not handle changes of a table"),
    "log_bin_compress": ("OFF", "compresses events"),
    "binlog_transaction_compression": ("OFF", "compresses transactions"),
    "binlog_row_value_options": ("", "omits parts of JSON values"),
    "binlog_order_commits": ("ON", "lets transactions commit in another order than that of the binlog"),
}
_MYSQL_ONLY = ("gtid_mode", "enforce_gtid_consistency")
_VERSION_MIN = {True: (10, 5), False: (8, 0)}


class MySqlServer(msgspec.Struct, frozen=True):
    """What kind of server it is, and what tells it from others."""

    is_mariadb: bool
    version: tuple[int, int]
    identity: str
    status: str
    """The statement that tells where the binlog ends."""
    folds_names: bool = False
    """Whether statements may write the names of tables in any case."""


def read_server(database: MySqlDatabase) -> MySqlServer:
    """The server behind a database."""
    ((version, number, folds),) = database.ask("SELECT version(), @@server_id, @@lower_case_table_names")
    is_mariadb = "mariadb" in version.lower()
    major, minor = re.findall(r"\d+", version)[:2]
    known = (int(major), int(minor))
    if is_mariadb:
        return MySqlServer(True, known, f"mariadb:{number}/{database.name}", "SHOW MASTER STATUS", bool(folds))
    ((uuid,),) = database.ask("SELECT @@server_uuid")
    return MySqlServer(
        False,
        known,
        f"mysql:{uuid}/{database.name}",
        "SHOW BINARY LOG STATUS" if known >= (8, 4) else "SHOW MASTER STATUS",
        bool(folds),
    )


def check_server(database: MySqlDatabase) -> MySqlServer:
    """Whether changes can be had from this server at all, by this user."""
    server = read_server(database)
    where = database.shown
    needed = _VERSION_MIN[server.is_mariadb]
    if server.version < needed:
        kind = "MariaDB" if server.is_mariadb else "MySQL"
        raise NotCapturable(
            f"{where} is {kind} {server.version[0]}.{server.version[1]}, but a capture needs {needed[0]}.{needed[1]} or newer.",
            advice="Upgrade the server.",
        )
    settings = database.variables("log_bin", *_WANTED, *_MYSQL_ONLY)
    if settings.get("log_bin") not in ("ON", "1"):
        raise NotCapturable(
            f"{where} does not write a binlog.",
            advice="Add these lines to [mysqld] in the server's configuration, and restart the server: server_id = 1, log_bin = binlog, "
            "binlog_format = ROW and binlog_row_metadata = FULL.",
        )
    for name, (wanted, why) in _WANTED.items():
        if name in settings and settings[name].upper() != wanted:
            raise NotCapturable(
                f"{where} runs with {name} = {settings[name]}, which {why}.",
                advice=f"Run: SET GLOBAL {name} = {wanted or repr('')}; and add the setting to the server's configuration. "
                "Open sessions keep the old value.",
            )
    if "binlog_row_metadata" not in settings:
        raise NotCapturable(f"{where} does not support column names in its binlog.", advice="Upgrade the server.")
    if not server.is_mariadb and settings.get("gtid_mode") != "ON":
        raise NotCapturable(
            f"{where} runs with gtid_mode = {settings.get('gtid_mode')}.",
            advice="Run these statements in order: SET GLOBAL enforce_gtid_consistency = ON; SET GLOBAL gtid_mode = OFF_PERMISSIVE; "
            "SET GLOBAL gtid_mode = ON_PERMISSIVE; SET GLOBAL gtid_mode = ON;",
        )
    _check_rights(database, server)
    return server


def check_tables(database: MySqlDatabase, tables: Collection[MyTable]) -> None:
    """Whether this user may read the tables; rights may be for columns only, so each is asked for nothing."""
    for table in tables:
        columns = ", ".join(quoted(column.name) for column in table.columns)
        try:
            database.ask(f"SELECT {columns} FROM {table.sql} LIMIT 0")
        except NotCapturable as error:
            raise NotCapturable(
                f"{database.shown}: {error.what.rpartition(': ')[2]}",
                advice=f"Run: GRANT SELECT ON {table.sql} TO {_user(database)};",
            ) from None


def _check_rights(database: MySqlDatabase, server: MySqlServer) -> None:
    """By the statement that needs a right where there is one, and by the list of grants where not."""
    user = _user(database)
    try:
        database.ask(server.status)
    except HeadwaterError as error:
        if not isinstance(error, NotCapturable):
            raise
        raise NotCapturable(
            f"{database.shown}: The user {user} is not allowed to read the binlog status.",
            advice=f"Run: {grants(database, user)}",
        ) from None
    granted = " ".join(row[0] for row in database.ask("SHOW GRANTS"))
    if not re.search(r"REPLICATION SLAVE\b(?! ADMIN)|ALL PRIVILEGES ON \*\.\*", granted):
        raise NotCapturable(
            f"{database.shown}: The user {user} is not allowed to read the binlog.",
            advice=f"Run: {grants(database, user)}",
        )


def _user(database: MySqlDatabase) -> str:
    """The account, as a GRANT names it."""
    ((account,),) = database.ask("SELECT current_user()")
    name, _, host = account.rpartition("@")
    return f"'{name}'@'{host}'"
