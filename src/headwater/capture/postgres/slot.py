"""The two things that a capture leaves in a PostgreSQL database: a publication (which tables) and a replication slot (from where on).

Order: the publication exists before the slot, so that every change behind the slot's position is in it; a table that is added later is
waited for until every transaction that has written to it before has ended, because of these the slot would give a part only. Both are
made once, found again by name, and dropped by `remove`. A publication that the URL names belongs to somebody else and is never changed.
While a capture catches up there is a temporary copy of the slot, too, which goes with its connection (`bulk`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from headwater.capture.postgres.connection import PostgresDatabase
from headwater.capture.postgres.positions import end_text, lsn_of
from headwater.capture.postgres.requirements import create_statement, published_tables
from headwater.capture.postgres.tables import PgTable
from headwater.databases.address import quoted
from headwater.model.errors import CaptureLost, NotCapturable, TimedOut

WRITERS_TIMEOUT_S = 60.0
LET_GO_S = 1.0
LET_GO_TIMEOUT_S = 20.0

_LOOK_AGAIN_S = 0.02
_NAME_MAX, _COPY = 63, "_ahead"
_SLOT = """
select plugin, database = current_database(), active_pid, wal_status, (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint
from pg_replication_slots where slot_name = %s"""
_WRITERS = """
select virtualtransaction, pid from pg_locks
where locktype = 'relation' and granted and database = (select oid from pg_database where datname = current_database())
  and relation = any(%s::oid[]) and mode in ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
  and pid is distinct from pg_backend_pid()"""


class Slot(NamedTuple):
    """A slot as the server has it."""

    plugin: str
    is_here: bool
    active_pid: int | None
    wal_status: str | None
    confirmed: int


def read_slot(database: PostgresDatabase, slot: str) -> Slot | None:
    """The slot, if there is one."""
    rows = database.ask(_SLOT, (slot,))
    return Slot(*rows[0]) if rows else None


def publish(database: PostgresDatabase, publication: str, tables: Collection[PgTable], *, is_ours: bool) -> None:
    """Makes the publication, or brings it up to these tables, and waits for transactions that it does not hold whole."""
    exists, published = published_tables(database, publication)
    wanted = {(table.namespace, table.name) for table in tables}
    added = [table for table in tables if (table.namespace, table.name) not in published]
    if not exists:
        database.ask(create_statement(publication, tables))
    elif added:
        database.ask(f"ALTER PUBLICATION {quoted(publication)} ADD TABLE {', '.join(table.sql for table in added)}")
    gone = sorted(published - wanted) if is_ours and exists and _owner(database, publication) is None else []
    for namespace, name in gone:
        database.ask(f"ALTER PUBLICATION {quoted(publication)} DROP TABLE {quoted(namespace)}.{quoted(name)}")
    if exists and added:
        _wait_for_writers(database, added)


def withdraw(database: PostgresDatabase, publication: str, table: PgTable) -> None:
    """Takes one table out of the publication."""
    database.ask(f"ALTER PUBLICATION {quoted(publication)} DROP TABLE {table.sql}")


def begin_slot(database: PostgresDatabase, slot: str) -> str:
    """Makes the slot anew, at the present; waits, as PostgreSQL does, for the transactions that write at this moment."""
    drop_slot(database, slot)
    database.ask("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    made = read_slot(database, slot)
    assert made is not None, "it was just made"
    return end_text(made.confirmed)


def find_slot(database: PostgresDatabase, slot: str, resume: str) -> str:
    """Whether the slot still has everything behind a position; `CaptureLost`."""
    found = read_slot(database, slot)
    again = "Start the capture with `--backfill-again`: it copies the tables again and continues from there."
    if found is None:
        raise CaptureLost(
            f"{database.shown}: The replication slot {slot} does not exist, so the changes after {resume} are lost.",
            advice=again,
        )
    if found.plugin != "pgoutput" or not found.is_here:
        raise NotCapturable(
            f"{database.shown}: The replication slot {slot} belongs to another program (plugin {found.plugin}).",
            advice="Use another slot for this capture: ?slot=NAME.",
        )
    if found.wal_status == "lost":
        raise CaptureLost(
            f"{database.shown}: The server has removed WAL that the slot {slot} needs.",
            advice=f"{again} To prevent this in the future, run: ALTER SYSTEM SET max_slot_wal_keep_size = -1;",
        )
    if found.confirmed > lsn_of(resume):
        raise CaptureLost(
            f"{database.shown}: The slot {slot} is at {end_text(found.confirmed)}, after the position {resume} of "
            "this log. The log is an older copy, or another program read the slot.",
            advice=again,
        )
    return resume


def take_slot(database: PostgresDatabase, slot: str) -> None:
    """Waits until nobody reads the slot; a reader that stays is ended: whoever wrote for it is fenced by the log."""
    begin = time.monotonic()
    ended = False
    while (found := read_slot(database, slot)) is not None and found.active_pid is not None:
        waited = time.monotonic() - begin
        if waited > LET_GO_S and not ended:
            database.ask("select pg_terminate_backend(%s)", (found.active_pid,))
            ended = True
        if waited > LET_GO_TIMEOUT_S:
            raise TimedOut(
                f"{database.shown}: Another connection reads the slot {slot} (process {found.active_pid} of the server).",
                advice=f"Stop the other capture, or run: SELECT pg_terminate_backend({found.active_pid});",
            )
        time.sleep(_LOOK_AGAIN_S)


def drop_slot(database: PostgresDatabase, slot: str) -> None:
    """Removes the slot, whoever reads it; none is fine."""
    if read_slot(database, slot) is not None:
        take_slot(database, slot)
        database.ask(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s", (slot,)
        )


def copy_name(slot: str) -> str:
    """What the temporary copy of a slot is called."""
    return slot[: _NAME_MAX - len(_COPY)] + _COPY


def end_copy(database: PostgresDatabase, slot: str) -> None:
    """Ends whoever reads the temporary copy of a slot, and the copy with it."""
    copy = copy_name(slot)
    if database.ask("select 1 from pg_replication_slots where slot_name = %s and temporary", (copy,)):
        take_slot(database, copy)


def drop_publication(database: PostgresDatabase, publication: str) -> None:
    """Removes the publication; none is fine. One that somebody else has made for us is theirs to drop."""
    if owner := _owner(database, publication):
        raise NotCapturable(
            f"{database.shown}: The slot was removed, but the publication {publication} belongs to the role {owner}.",
            advice=f"Run as that role: DROP PUBLICATION {quoted(publication)};",
        )
    database.ask(f"DROP PUBLICATION IF EXISTS {quoted(publication)}")


def _owner(database: PostgresDatabase, publication: str) -> str | None:
    """Whose a publication is, if it is not ours."""
    rows = database.ask(
        "select pg_get_userbyid(pubowner) from pg_publication where pubname = %s and not pg_has_role(pubowner, 'USAGE')",
        (publication,),
    )
    return rows[0][0] if rows else None


def _wait_for_writers(database: PostgresDatabase, tables: Sequence[PgTable]) -> None:
    oids = [table.oid for table in tables]
    writers = {(transaction, pid) for transaction, pid in database.ask(_WRITERS, (oids,))}
    deadline = time.monotonic() + WRITERS_TIMEOUT_S
    while writers:
        time.sleep(_LOOK_AGAIN_S)
        writers &= {(transaction, pid) for transaction, pid in database.ask(_WRITERS, (oids,))}
        if writers and time.monotonic() > deadline:
            pid = min(pid or 0 for _, pid in writers)
            raise TimedOut(
                f"{database.shown}: Table {tables[0].topic} is locked by a transaction that has written to it (process {pid}).",
                advice=f"Wait until they have ended and try again, or end them: SELECT pg_terminate_backend({pid});",
            )
