"""A view as its readers see it: by key, in SQL, as it was, and live.

Rows come from the store. Earlier rows (`as_of`) and subscriptions come from the topic of changes in the log. Without a log a view
can be read and queried, but not subscribed to. Thread-safety: any number of threads; a subscription belongs to one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from headwater.databases.keys import key_texts
from headwater.log.arrow.rows import to_batch
from headwater.log.log import Log, open_log
from headwater.log.port.topic import check_name
from headwater.model.clock import time_us
from headwater.model.errors import EventsMissed, InvalidInput, NotFound, Unsupported
from headwater.views.catalog import ViewCatalog
from headwater.views.changes import KEY
from headwater.views.definition import ViewDefinition, check_limit, check_order
from headwater.views.store import Limits, ViewSelection, ViewStore
from headwater.views.store_url import open_view_store
from headwater.views.subscription import Subscription
from headwater.views.token import Token, is_token, parse_token
from headwater.views.top_n import ranked_keys
from headwater.views.topic import fold

Moment = datetime | str | int | Token
"""A moment of a view: when its changes were appended to the log, or the token of a change."""

_SWAPS_MAX = 5


def open_view(url: str, name: str, *, log: Log | str | os.PathLike[str] | None = None) -> View:
    """Opens a view for reading: in a store (`sqlite:///./data/views.db`, `postgresql://…`), by its name.

    With the `log` that it is maintained in it can also be read as of an earlier time and subscribed to.
    """
    check_name(name, of="view")
    store = open_view_store(url, read_only=True)
    try:
        store.read(name, ViewSelection(limit=1))
        opened = open_log(log, create=False, read_only=True) if isinstance(log, (str, os.PathLike)) else log
    except BaseException:
        store.close()
        raise
    return View(store, name, log=opened, owns_log=opened is not log)


class View:
    """A maintained, queryable, subscribable result."""

    def __init__(self, store: ViewStore, name: str, *, log: Log | None = None, owns_log: bool = False) -> None:
        self.name = name
        self._store = store
        self._log = log
        self._owns_log = owns_log

    def __repr__(self) -> str:
        log = None if self._log is None else self._log.url
        return f"View(name={self.name!r}, store={self._store.url!r}, log={log!r})"

    @property
    def definition(self) -> ViewDefinition:
        """What the view is now."""
        return self._store.read(self.name, ViewSelection(limit=1)).stored.definition

    def get(self, **key: Any) -> dict[str, Any] | None:
        """The row of a key, given as the values of its columns; None where there is none."""

        def select(definition: ViewDefinition) -> ViewSelection:
            return ViewSelection(keys=pa.array([key_text(definition, key)], pa.string()))

        rows = self._read(select).drop_columns([KEY]).to_pylist()
        return rows[0] if rows else None

    def rows(
        self,
        where: Mapping[str, Any] | str | None = None,
        *,
        as_of: Moment | None = None,
        order: str | Sequence[str] | None = None,
        limit: int | None = None,
        timeout_s: float = 10.0,
    ) -> pa.Table:
        """The rows: all, those with certain values (`{"page": "/"}`), or those for which an SQL condition is true.

        `order` and `limit` are the view's own (its top-N) where none are given; `order="-count"` is descending.
        """

        def select(definition: ViewDefinition) -> ViewSelection:
            return _selection(definition, where, order, limit)

        if as_of is None:
            return self._read(select, Limits(timeout_s=timeout_s)).drop_columns([KEY])
        if isinstance(where, str):
            raise InvalidInput(
                "An SQL condition cannot be combined with as_of.",
                advice="Give a dict of values, or ask view.sql('select …', as_of=…).",
            )
        definition, rows = self._as_of(as_of)
        return _selected(rows, select(definition), definition).drop_columns([KEY])

    def sql(
        self, query: str, *, as_of: Moment | None = None, timeout_s: float = 10.0, rows_max: int = 100_000
    ) -> pa.Table:
        """The answer to one SELECT in the store's own SQL; it can change nothing, and is stopped at its limits.

        All views of the store can be named; with `as_of` this one has the rows that it had then.
        """
        if not str(query).strip():
            raise InvalidInput("The query is empty.", advice=f'Write a query such as select * from "{self.name}".')
        limits = Limits(timeout_s=timeout_s, rows_max=rows_max)
        instead = None if as_of is None else self._as_of(as_of)
        return self._store.ask(query, limits=limits, instead=instead)

    def subscribe(
        self,
        since: str | Token | None = None,
        *,
        order: str | Sequence[str] | None = None,
        limit: int | None = None,
        heartbeat_s: float | None = None,
    ) -> Subscription:
        """The current rows and then every change, or every change since a token (see `Change`).

        With `order` and `limit` of the first rows only: who enters and who leaves.
        """
        return Subscription(
            self._store,
            self._needed_log("subscribe to"),
            self.name,
            since=since,
            order=order,
            limit=limit,
            heartbeat_s=heartbeat_s,
        )

    def close(self) -> None:
        """Frees the store, and the log if it was opened for this view."""
        self._store.close()
        if self._owns_log and self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, select: Callable[[ViewDefinition], ViewSelection], limits: Limits | None = None) -> pa.Table:
        """Rows that a definition selects, of that very generation; once more where it was swapped away in between."""
        for left in range(_SWAPS_MAX, -1, -1):
            definition = self.definition
            try:
                generation = definition.generation
                return self._store.read(self.name, select(definition), generation=generation, limits=limits).rows
            except NotFound:
                if not left:
                    raise
        raise AssertionError("the last turn raises or returns")

    def _as_of(self, moment: Moment) -> tuple[ViewDefinition, pa.Table]:
        """The rows as they were."""
        log = self._needed_log("query an earlier state of")
        definition = ViewCatalog(log).get(self.name).definition
        topic = log.topic(definition.changes)
        held = log.offsets(topic.name)
        if topic.compact or any(span.start for span in held.values()):
            raise EventsMissed(
                f"The earlier states of view {self.name!r} are not available, because its topic no longer has all changes.",
                advice="Keep all changes of the topic: use neither compact nor retention.",
                last=max((span.start for span in held.values()), default=0) - 1,
            )
        if is_token(moment):
            token = parse_token(moment, view=self.name)
            if (token.generation, token.topic_id) != (definition.generation, topic.id):
                raise InvalidInput(
                    f"The token belongs to generation {token.generation}, but the view has generation {definition.generation}.",
                    advice="Query by time, or use a token of the present generation.",
                )
            ends = token.positions
        else:
            assert not isinstance(moment, Token)
            ends = log.offsets_at(topic.name, time_us(moment) + 1, by="appended")
        return definition, fold(log, definition, ends)

    def _needed_log(self, what: str) -> Log:
        if self._log is None:
            raise Unsupported(
                f"To {what} view {self.name!r}, open the view with its log.",
                advice='Use open_view(url, name, log="./data").',
            )
        return self._log


def _selection(
    definition: ViewDefinition,
    where: Mapping[str, Any] | str | None,
    order: str | Sequence[str] | None,
    limit: int | None,
) -> ViewSelection:
    return ViewSelection(
        equals=_values(definition, where) if isinstance(where, Mapping) else {},
        condition=where if isinstance(where, str) else None,
        order=check_order(definition.name, definition.schema, definition.order if order is None else order),
        limit=check_limit(definition.limit if limit is None else limit),
    )


def _values(definition: ViewDefinition, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The values in the types of their columns."""
    fields = []
    for column in wanted:
        if column not in definition.schema.names or pa.types.is_nested(definition.schema.field(column).type):
            raise InvalidInput(
                f"View {definition.name!r} has no column {column!r} to filter by.",
                advice=f"Its columns are: {', '.join(definition.schema.names)}. Use SQL to filter by nested fields.",
            )
        fields.append(definition.schema.field(column).with_nullable(True))
    return to_batch([dict(wanted)], pa.schema(fields)).to_pylist()[0] if fields else {}


def _selected(rows: pa.Table, selection: ViewSelection, definition: ViewDefinition) -> pa.Table:
    """A selection, made by Arrow."""
    for column, value in selection.equals.items():
        values = rows.column(column)
        wanted = pa.array([value], definition.schema.field(column).type)[0]
        rows = rows.filter(pc.equal(values, wanted).fill_null(False) if wanted.is_valid else values.is_null())
    if selection.order:
        ranked = ranked_keys(rows, selection.order)
        rows = rows.take(pc.index_in(ranked, value_set=rows.column(KEY).combine_chunks()))
    return rows if selection.limit is None else rows.slice(0, selection.limit)


def key_text(definition: ViewDefinition, key: Mapping[str, Any]) -> str:
    """The text of one key that a user gave by its columns' values; `headwater.databases.keys` says how it is made."""
    if set(key) != set(definition.key) or not definition.key:
        wanted = ", ".join(definition.key) or "empty, because its rows are append-only"
        raise InvalidInput(
            f"The key of view {definition.name!r} is {wanted}; got {', '.join(key) or 'nothing'}.",
            advice="Pass each key column once, such as get(page='/').",
        )
    fields = [definition.schema.field(column).with_nullable(True) for column in definition.key]
    return key_texts(to_batch([dict(key)], pa.schema(fields)), definition.key)[0].as_py()
