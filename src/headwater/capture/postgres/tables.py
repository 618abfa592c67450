"""The tables of a PostgreSQL database as its catalog has them now: columns, types, identity, and whether they can be captured.

A table is captured by what identifies its rows in the stream: the primary key, the index of `REPLICA IDENTITY USING INDEX`, or
with `REPLICA IDENTITY FULL` the primary key or columns that the caller gives. **A table without an identity must never be published**: from
then on PostgreSQL refuses the application's own UPDATEs and DELETEs. A deferrable primary key identifies nothing, for PostgreSQL too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import pyarrow as pa

from headwater.capture.postgres.connection import PostgresDatabase
from headwater.capture.postgres.types import CatalogType, PgType, named_types, type_of
from headwater.capture.replica import with_keys
from headwater.capture.source import SourceTable
from headwater.databases.address import quoted
from headwater.model.errors import NotCapturable

DEFAULT, BY_INDEX, FULL, NOTHING = "d", "i", "f", "n"
"""The replica identities."""

DEPTH_MAX = 32

_TABLES = """
select c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relreplident::text, c.relpersistence::text,
       greatest(c.reltuples, 0)::bigint, has_table_privilege(c.oid, 'SELECT'), pg_has_role(c.relowner, 'USAGE')
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p', 'v', 'm', 'f') and n.nspname not in ('pg_catalog', 'information_schema')
  and n.nspname !~ '^pg_(toast|temp)' and not c.relispartition
order by n.nspname, c.relname"""

_COLUMNS = """
select a.attrelid::bigint, a.attname, a.atttypid::bigint, a.atttypmod, pg_get_expr(d.adbin, d.adrelid), a.attgenerated <> '',
       a.atthasdef or a.atthasmissing or a.attidentity <> '', format_type(a.atttypid, a.atttypmod)
from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = any(%s::oid[]) and a.attnum > 0 and not a.attisdropped order by a.attrelid, a.attnum"""

_INDEXES = """
select i.indrelid::bigint, i.indisprimary, i.indisreplident,
       array(select a.attname::text from unnest(i.indkey) with ordinality k (number, place)
             join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.number
             where k.place <= i.indnkeyatts order by k.place)
from pg_index i where i.indrelid = any(%s::oid[]) and (i.indisprimary or i.indisreplident) and i.indimmediate and i.indisvalid"""

_TYPES = """
select t.oid::bigint, case when t.typcategory = 'A' and e.typdelim = ',' and t.oid not in (22, 30) then 'a' else t.typtype::text end,
       t.typelem::bigint, t.typbasetype::bigint, t.typtypmod,
       c.names, c.types, c.modifiers
from pg_type t left join pg_type e on e.oid = t.typelem left join lateral (
    select coalesce(array_agg(a.attname::text order by a.attnum), '{}') names,
           coalesce(array_agg(a.atttypid::bigint order by a.attnum), '{}') types,
           coalesce(array_agg(a.atttypmod order by a.attnum), '{}') modifiers
    from pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped) c on true
where t.oid = any(%s::oid[])"""


class PgColumn(msgspec.Struct, frozen=True):
    """A column as the catalog has it; `expression` is what a generated one is computed of, or a default."""

    name: str
    type: int
    modifier: int
    expression: str | None = None
    generated: bool = False
    filled: bool = False
    """Whether rows from before the column may have a value in it."""
    declared: str = "text"
    """The type as a cast names it."""


class PgTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table as the catalog has it."""

    oid: int
    namespace: str
    name: str
    kind: str
    identity: str
    persistence: str
    rows_estimate: int
    readable: bool
    owned: bool
    columns: tuple[PgColumn, ...]
    primary: tuple[str, ...] = ()
    identifying: tuple[str, ...] = ()

    @property
    def topic(self) -> str:
        """What the log calls it."""
        return topic_name(self.namespace, self.name)

    @property
    def sql(self) -> str:
        """Its name in a statement."""
        return f"{quoted(self.namespace)}.{quoted(self.name)}"


class CapturedPgTable(msgspec.Struct, frozen=True):
    """A table that is captured: as the runner knows it, and as the catalog had it then."""

    info: SourceTable
    table: PgTable


class Types:
    """The types that the catalog has explained so far; asks for those that it has not."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._known: dict[int, CatalogType] = {}

    def learn(self, oids: Iterable[int], *, again: bool = False) -> None:
        """Asks for types, and for what they are made of; with `again` also for those that are known."""
        wanted, seen = named_types(oids), set() if again else set(self._known)
        for _ in range(DEPTH_MAX):
            wanted -= seen
            if not wanted:
                return
            seen |= wanted
            found: set[int] = set()
            for oid, kind, element, base, modifier, names, types, modifiers in self._database.ask(
                _TYPES, (list(wanted),)
            ):
                columns = tuple(zip(names, types, modifiers, strict=True))
                self._known[oid] = CatalogType(kind, element, base, modifier, columns if kind == "c" else ())
                found |= {base, *types} if kind in "dc" else {element} if kind == "a" else set()
            wanted = named_types(found - {0})

    def of(self, oid: int, modifier: int) -> PgType:
        """A column's type."""
        return type_of(oid, modifier, self._known)


def topic_name(namespace: str, name: str) -> str:
    """What the log calls a table."""
    return name if namespace == "public" else f"{namespace}.{name}"


def read_tables(database: PostgresDatabase) -> dict[str, PgTable]:
    """Every table, view and foreign table, by what the log would call it."""
    listed = database.ask(_TABLES)
    oids = [row[0] for row in listed]
    columns: dict[int, list[PgColumn]] = {oid: [] for oid in oids}
    for oid, *column in database.ask(_COLUMNS, (oids,)):
        columns[oid].append(PgColumn(*column))
    primary: dict[int, tuple[str, ...]] = {}
    identifying: dict[int, tuple[str, ...]] = {}
    for oid, is_primary, is_identity, names in database.ask(_INDEXES, (oids,)):
        if is_primary:
            primary[oid] = tuple(names)
        if is_identity:
            identifying[oid] = tuple(names)
    tables = [
        PgTable(
            oid=oid,
            namespace=namespace,
            name=name,
            kind=kind,
            identity=identity,
            persistence=persistence,
            rows_estimate=rows,
            readable=readable,
            owned=owned,
            columns=tuple(columns[oid]),
            primary=primary.get(oid, ()),
            identifying=identifying.get(oid, ()),
        )
        for oid, namespace, name, kind, identity, persistence, rows, readable, owned in listed
    ]
    return {table.topic: table for table in tables}


def key_of(table: PgTable, given: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns that identify a table's rows in the stream; `NotCapturable` with the statement that gives it some."""
    what = f"Table {table.topic}"
    if table.kind not in "rp":
        raise NotCapturable(
            f"{what} is a view or a foreign table, not a table.", advice="Capture the tables that it reads."
        )
    if table.persistence != "p":
        raise NotCapturable(f"{what} is an unlogged table.", advice=f"Run: ALTER TABLE {table.sql} SET LOGGED;")
    unknown = [name for name in given if name not in {column.name for column in table.columns}]
    if unknown:
        raise NotCapturable(f"{what} has no column {unknown[0]!r}.", advice=f"Its columns are: {_names(table)}.")
    if table.identity == DEFAULT and table.primary and (not given or tuple(given) == table.primary):
        return table.primary
    if table.identity == BY_INDEX and table.identifying and (not given or tuple(given) == table.identifying):
        return table.identifying
    if table.identity == FULL and (given or table.primary):
        return tuple(given) or table.primary
    return _without_identity(table, tuple(given))


def info_of(table: PgTable, key: tuple[str, ...], types: Types) -> SourceTable:
    """The table as the runner knows it."""
    types.learn(column.type for column in table.columns)
    fields = [pa.field(column.name, types.of(column.type, column.modifier).arrow) for column in table.columns]
    return SourceTable(name=table.topic, schema=pa.schema(fields), key=key, rows_estimate=table.rows_estimate)


def _without_identity(table: PgTable, given: tuple[str, ...]) -> tuple[str, ...]:
    what = f"Table {table.topic}"
    why = "without one, PostgreSQL would reject UPDATEs and DELETEs of applications"
    if given:
        index = f"{table.name}_{'_'.join(given)}_key"
        columns = ", ".join(map(quoted, given))
        raise NotCapturable(
            f"{what} does not send the columns {', '.join(given)} of updated and deleted rows.",
            advice=f"Run: ALTER TABLE {table.sql} REPLICA IDENTITY FULL; or, if the columns are unique and NOT NULL: CREATE UNIQUE INDEX "
            f"{quoted(index)} ON {table.sql} ({columns}); ALTER TABLE {table.sql} REPLICA IDENTITY USING INDEX {quoted(index)};",
        )
    if table.primary:
        raise NotCapturable(
            f"{what} has no replica identity; {why}.", advice=f"Run: ALTER TABLE {table.sql} REPLICA IDENTITY DEFAULT;"
        )
    raise NotCapturable(
        f"{what} has no primary key (or a deferrable one); {why}.",
        advice=f"Run: ALTER TABLE {table.sql} ADD PRIMARY KEY (…); or, with a unique index over NOT NULL columns: ALTER TABLE "
        f"{table.sql} REPLICA IDENTITY USING INDEX …; or ALTER TABLE {table.sql} REPLICA IDENTITY FULL; and pass unique columns as `key=`.",
    )


def _names(table: PgTable) -> str:
    return ", ".join(column.name for column in table.columns)


def chosen(
    tables: Mapping[str, PgTable], names: Sequence[str], keys: Mapping[str, Sequence[str]]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The tables to capture and their keys: those that are named, or all that can be captured; and why the others cannot."""
    bare = [name.removeprefix("public.") for name in names]
    missing = [name for name in bare if name not in tables]
    if missing:
        raise NotCapturable(
            f"Table {missing[0]!r} does not exist.",
            advice=f"The tables are: {', '.join(list(tables)[:20]) or 'none'}. Outside the schema public, add the schema "
            "to the name: sales.orders.",
        )
    return with_keys(tables, bare, keys, key_of)
