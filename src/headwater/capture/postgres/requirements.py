"""What a PostgreSQL server must allow before one of its databases is captured, each with the statement that allows it.

Nothing is made or changed here. The order is that in which somebody would set it up: the server's settings, the role, the tables, the
publication, a free slot.
"""

from __future__ import annotations

from collections.abc import Collection

from headwater.capture.postgres.connection import PostgresDatabase, literal
from headwater.capture.postgres.tables import PgTable
from headwater.databases.address import quoted
from headwater.model.errors import NotCapturable

VERSION_MIN = 15

_SERVER = """
select current_setting('server_version_num')::int, current_setting('wal_level'), current_setting('max_wal_senders')::int,
       current_setting('max_replication_slots')::int, pg_is_in_recovery(), current_user,
       (select rolreplication or rolsuper from pg_roles where rolname = current_user),
       has_database_privilege(current_database(), 'CREATE')"""

_PUBLISHED = """
select schemaname, tablename from pg_publication_tables where pubname = %s"""


def check_server(database: PostgresDatabase, *, slot: str) -> None:
    """Whether changes can be had from this server at all, by this role."""
    version, wal_level, senders, slots, standby, role, replicates, _ = database.ask(_SERVER)[0]
    where = database.shown
    if version < VERSION_MIN * 10_000:
        raise NotCapturable(
            f"{where} is PostgreSQL {version // 10_000}, but a capture needs {VERSION_MIN} or newer.",
            advice="Upgrade the server.",
        )
    if standby:
        raise NotCapturable(f"{where} is a standby server.", advice="Capture the primary server.")
    if wal_level != "logical":
        raise NotCapturable(
            f"{where} runs with wal_level = {wal_level}, but a capture needs wal_level = logical.",
            advice="Run: ALTER SYSTEM SET wal_level = logical; and restart the server.",
        )
    if not senders:
        raise NotCapturable(
            f"{where} runs with max_wal_senders = 0.",
            advice="Run: ALTER SYSTEM SET max_wal_senders = 10; and restart the server.",
        )
    if not replicates:
        raise NotCapturable(
            f"{where}: The role {role} lacks the REPLICATION attribute.",
            advice=f"Run as a superuser: ALTER ROLE {quoted(role)} REPLICATION;",
        )
    _check_slots(database, slot, slots)


def check_tables(database: PostgresDatabase, tables: Collection[PgTable], *, publication: str) -> None:
    """Whether this role may read the tables, and publish those that are not published yet."""
    role, may_create = (database.ask(_SERVER)[0][at] for at in (5, 7))
    for table in tables:
        if not table.readable:
            raise NotCapturable(
                f"{database.shown}: The role {role} is not allowed to read table {table.topic}.",
                advice=f"Run: GRANT SELECT ON {table.sql} TO {quoted(role)}; (and GRANT USAGE ON SCHEMA {quoted(table.namespace)})",
            )
    exists, published = published_tables(database, publication)
    unpublished = [table for table in tables if (table.namespace, table.name) not in published]
    if not unpublished:
        return
    foreign = [table for table in unpublished if not table.owned]
    if not exists and (not may_create or foreign):
        raise NotCapturable(
            f"{database.shown}: The role {role} is not allowed to create the publication {publication} "
            + (f"of table {foreign[0].topic}, which it does not own." if may_create else "in this database."),
            advice=f"Run as the tables' owner: {create_statement(publication, tables)}",
        )
    if exists and foreign:
        raise NotCapturable(
            f"{database.shown}: The role {role} is not allowed to add table {foreign[0].topic} to the publication {publication}.",
            advice=f"Run as the table's owner: ALTER PUBLICATION {quoted(publication)} ADD TABLE {foreign[0].sql};",
        )


def published_tables(database: PostgresDatabase, publication: str) -> tuple[bool, set[tuple[str, str]]]:
    """Whether a publication exists, and the tables in it by schema and name."""
    exists = bool(database.ask("select 1 from pg_publication where pubname = %s", (publication,)))
    return exists, {(namespace, name) for namespace, name in database.ask(_PUBLISHED, (publication,))}


def create_statement(publication: str, tables: Collection[PgTable]) -> str:
    """What makes the publication; changes of partitions are those of their table."""
    listed = ", ".join(table.sql for table in tables)
    return f"CREATE PUBLICATION {quoted(publication)} FOR TABLE {listed} WITH (publish_via_partition_root = true);"


def _check_slots(database: PostgresDatabase, slot: str, slots_max: int) -> None:
    slots = dict(database.ask("select slot_name, active from pg_replication_slots"))
    if slot in slots or len(slots) < slots_max:
        return
    idle = [name for name, active in slots.items() if not active]
    drop = (
        f"Drop one that nobody needs: SELECT pg_drop_replication_slot({literal(idle[0])}); or raise"
        if idle
        else "Raise"
    )
    raise NotCapturable(
        f"{database.shown}: All {slots_max} replication slots are in use ({', '.join(sorted(slots)[:5])}).",
        advice=f"{drop} the limit: ALTER SYSTEM SET max_replication_slots = {slots_max + 10}; and restart the server.",
    )
