"""A view store: it holds the rows of views for queries, and how far they follow the log.

A store holds one table for each generation of a view, the SQL view `<view>` on the current one, and in `headwater@views` for
each generation its definition, the last batch, and the place in its topic of changes up to which they were applied. It is derived
from the log and may be deleted at any time: maintainers rebuild it from the topics.

SQLite (`sqlite:///./data/views.db`) and PostgreSQL (`postgresql://…`) are the two stores; both pass the contract of
`headwater.testing.contracts.views`. One process maintains a view, any number read it. A store may be used by many threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from headwater.model.errors import Fenced, InvalidInput, NotFound
from headwater.views.changes import Delta
from headwater.views.definition import ViewDefinition

META = "headwater@views"
QUESTION = "headwater@question"


class Applied(msgspec.Struct, frozen=True):
    """How far a generation in a store follows its topic of changes: the topic's id, the next offset of each partition."""

    topic_id: str = ""
    positions: dict[int, int] = {}
    query: str = ""
    epoch: int = -1

    def to_json(self) -> str:
        """As a store keeps it: equal text, equal places."""
        ordered = msgspec.structs.replace(self, positions=dict(sorted(self.positions.items())))
        return msgspec.json.encode(ordered).decode()


class Limits(msgspec.Struct, frozen=True):
    """What one query may cost."""

    timeout_s: float = 10.0
    rows_max: int = 100_000
    bytes_max: int = 256 << 20


class Stored(msgspec.Struct, frozen=True):
    """A generation of a view in a store."""

    definition: ViewDefinition
    applied: Applied
    current: bool


class Snapshot(msgspec.Struct, frozen=True):
    """Rows of a view (with the key's text in `_key`) as they were at one moment, and the place in the log of that moment."""

    stored: Stored
    rows: pa.Table


class ViewSelection(msgspec.Struct, frozen=True):
    """Which rows: of these keys, with these values, for which an SQL condition is true; ordered, and only the first."""

    keys: pa.Array | None = None
    equals: Mapping[str, Any] = {}
    condition: str | None = None
    order: Sequence[str] = ()
    limit: int | None = None


EVERYTHING = ViewSelection()


class ViewStore(Protocol):
    """A kind of store. `url` has no password in it."""

    url: str

    def stored(self) -> list[Stored]:
        """Every generation of every view, by name and generation."""

    def create(self, definition: ViewDefinition) -> None:
        """Makes room for a generation, unless it is there; nobody sees it before `show`."""

    def show(self, name: str, generation: int) -> None:
        """Lets readers see this generation, all of them from one moment on."""

    def drop(self, name: str, generation: int) -> None:
        """Removes a generation that is no longer seen."""

    def check(self, definition: ViewDefinition, rows: pa.Table) -> None:
        """Refuses rows that the store cannot hold exactly, before they are in the log; `InvalidInput`."""

    def apply(
        self, definition: ViewDefinition, delta: Delta, *, before: Applied, after: Applied, clear: bool = False
    ) -> None:
        """Changes rows and moves on in the log, in one transaction; `clear` empties the generation first.

        `Fenced` where the generation is not, or no longer, at `before`: somebody else maintains it.
        """

    def read(
        self,
        name: str,
        selection: ViewSelection = EVERYTHING,
        *,
        generation: int | None = None,
        limits: Limits | None = None,
    ) -> Snapshot:
        """Rows of a generation, or of the current one, in one transaction; `NotFound`, `TimedOut`."""

    def ask(self, query: str, *, limits: Limits, instead: tuple[ViewDefinition, pa.Table] | None = None) -> pa.Table:
        """The answer to one SELECT, which can change nothing; `InvalidInput`, `TimedOut`.

        `instead` gives other rows for the name of a view in this query.
        """

    def close(self) -> None:
        """Frees everything."""


def table_name(definition: ViewDefinition) -> str:
    """The table of a generation; a view's own name cannot have the `@`."""
    return f"{definition.name}@{definition.generation}"


def order_sql(selection: ViewSelection, expression: Mapping[str, str]) -> str:
    """The ORDER BY and LIMIT of a selection; `expression` says how a column is ordered."""
    text = ""
    if selection.order:
        parts = [
            f"{expression[column.removeprefix('-')]}{' desc' if column.startswith('-') else ''} nulls last"
            for column in selection.order
        ]
        text = f" order by {', '.join([*parts, expression['_key']])}"
    return text if selection.limit is None else f"{text} limit {int(selection.limit)}"


def check_condition(condition: str, definition: ViewDefinition, *, dialect: str) -> str:
    """The condition in brackets, if it is one SQL expression and nothing else."""
    import sqlglot

    try:
        sqlglot.condition(condition, dialect=dialect)
    except (sqlglot.errors.SqlglotError, AttributeError, TypeError) as error:
        raise InvalidInput(
            f"where={condition!r:.80} is not a valid SQL condition: {str(error).splitlines()[0]:.120}",
            advice=f"Write one condition over the columns {', '.join(definition.schema.names)}, or pass a dict of values.",
        ) from None
    return f"(\n{condition}\n)"


def choose(found: Sequence[Stored], name: str, generation: int | None, url: str) -> Stored:
    """The requested generation, or the current one; `NotFound`."""
    for stored in found:
        if stored.definition.generation == generation or (generation is None and stored.current):
            return stored
    raise not_stored(name, generation, url)


def not_stored(name: str, generation: int | None, url: str) -> NotFound:
    """The error for a view, or a generation of it, that is not there."""
    which = "" if generation is None else f" of generation {generation}"
    return NotFound(
        f"View {name!r}{which} does not exist in {url}.",
        advice="Run the application of the view first. `headwater views list` prints the views of a log.",
    )


def moved_on(definition: ViewDefinition, before: Applied, found: Applied | None) -> Fenced:
    """The error for a generation that somebody else has changed."""
    at = "gone" if found is None else f"at {found.positions}"
    return Fenced(
        f"View {definition.name!r}, generation {definition.generation}, was at {before.positions}, but is now {at}.",
        advice="The store was not changed. Another process maintains this view, so stop this one.",
    )


def columns_within(limits: Limits, chunks: Iterable[Sequence[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """The columns of all rows, as long as those stay below the limits; none where there is no row."""
    rows: list[tuple[Any, ...]] = []
    size = 0
    for chunk in chunks:
        rows += chunk
        size += sum(len(value) if isinstance(value, (str, bytes)) else 8 for row in chunk for value in row)
        if len(rows) > limits.rows_max or size > limits.bytes_max:
            raise _too_large(limits)
    return list(zip(*rows, strict=True))


def _too_large(limits: Limits) -> InvalidInput:
    """The error for an answer beyond its limits."""
    return InvalidInput(
        f"The result is larger than {limits.rows_max:,} rows or {limits.bytes_max >> 20} MiB.",
        advice="Select less (LIMIT, WHERE, GROUP BY), or raise rows_max.",
    )
