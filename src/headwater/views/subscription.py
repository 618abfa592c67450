"""A subscription: the rows that a view has now, then every change of them, once and in order.

What comes is a `Change` of one of these kinds:

    added      a row is there: one of the current rows, or a new one
    changed    a row became another one; in a top-N also: `old` left it and `new` entered it
    removed    a row is gone
    ready      all current rows have come; what follows are changes
    reset      forget everything: the view was built anew, or the token is too old. The current rows follow, then `ready`
    heartbeat  nothing happened for `heartbeat_s`

The rows are read from the store together with their place in the topic of changes, and the changes from that place on, so
there is no gap and nothing comes twice. A change is seen as soon as it is in the log, which can be a moment before the store
has it. `ready` and everything after it carry a token; among the current rows there is no place to go on from.

A swap to another generation stands in the catalogue's topic, which is watched too. The topic of the first generation goes on after
it, with the changes of the next one (see `topic`): a subscription ends where these begin, and starts again with a `reset`.
Thread-safety: none.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.clients.reader import Start
from headwater.log.disk.wait import wait_async
from headwater.log.log import Log
from headwater.log.port.store import Waiter, check_not_missed
from headwater.log.port.topic import Topic
from headwater.model.errors import Closed, EventsMissed, InvalidInput, PositionLost
from headwater.views.catalog import TOPIC as CATALOG
from headwater.views.catalog import ViewCatalog
from headwater.views.changes import KEY
from headwater.views.definition import check_limit, check_order
from headwater.views.store import ViewStore
from headwater.views.token import Token, parse_token
from headwater.views.top_n import RankedRows
from headwater.views.topic import SWAPPED, fold

Kind = Literal["added", "changed", "removed", "ready", "reset", "heartbeat"]
Row = dict[str, Any]

WAIT_S_MAX = 1.0
_ROWS_AT_ONCE = 4_096
_EVENTS_AT_ONCE = 65_536
_COLUMNS = ["key", "old", "new", "_partition", "_offset", "epoch"]


class Change(msgspec.Struct, frozen=True):
    """One thing that happened to a view; `token` is the place after it, `why` says what a reset is for."""

    kind: Kind
    old: Row | None = None
    new: Row | None = None
    token: str | None = None
    why: str = ""


class Subscription:
    """The feed of a view: iterate over it, with or without `async`, or `poll` it. Close it, or use it in a `with`."""

    def __init__(
        self,
        store: ViewStore,
        log: Log,
        name: str,
        *,
        since: str | Token | None,
        order: str | Sequence[str] | None,
        limit: int | None,
        heartbeat_s: float | None,
    ) -> None:
        if heartbeat_s is not None and not heartbeat_s > 0:
            raise InvalidInput(
                f"heartbeat_s={heartbeat_s!r} is not a positive number of seconds.",
                advice="Pass a number of seconds, or leave out heartbeat_s.",
            )
        self.token: str | None = None
        self._store = store
        self._log = log
        self._name = name
        self._order = order
        self._limit = limit
        self._heartbeat_s = heartbeat_s
        self._heard = time.monotonic()
        self._closed = False
        self._is_replaced = False
        self._source: Iterator[Change] = iter(())
        self._top: RankedRows | None = None
        self._open(None if since is None else parse_token(since, view=name))

    def __repr__(self) -> str:
        return f"Subscription(view={self._name!r}, token={self.token!r}, {'closed' if self._closed else 'open'})"

    def poll(self, *, changes_max: int = 500, timeout_s: float = 1.0) -> list[Change]:
        """The next changes; an empty list (or a heartbeat) when none came in time."""
        deadline = time.monotonic() + timeout_s
        while not (found := self._next(changes_max)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._waiter.wait(min(left, self._patience()))
        return found

    async def poll_async(self, *, changes_max: int = 500, timeout_s: float = 1.0) -> list[Change]:
        """`poll` for asyncio: other tasks run while it waits."""
        deadline = time.monotonic() + timeout_s
        while not (found := self._next(changes_max)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await wait_async(self._waiter, min(left, self._patience()))
        return found

    def close(self) -> None:
        """Frees what it waits on; who iterates over it comes to the end."""
        self._closed = True
        self._waiter.close()
        self._reader.close()
        self._catalog.close()

    def __iter__(self) -> Iterator[Change]:
        while not self._closed:
            yield from self.poll(changes_max=1)

    async def __aiter__(self) -> AsyncIterator[Change]:
        while not self._closed:
            for change in await self.poll_async(changes_max=1):
                yield change

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Where it begins

    def _open(self, token: Token | None, *, why: str = "") -> None:
        """Begins at a token, or with the current rows; after a `reset` where there is something to forget."""
        catalog = ViewCatalog(self._log)
        catalog.get(self._name)
        self._is_replaced = False
        self._catalog = self._log.reader(CATALOG, start="latest")  # before the entry counts: a swap after it is seen
        self._definition = catalog.get(self._name).definition
        order = self._definition.order if self._order is None else self._order
        limit = self._definition.limit if self._limit is None else self._limit
        order = check_order(self._name, self._definition.schema, order)
        self._top = RankedRows(order, check_limit(limit)) if order or limit is not None else None
        self._start(token, why)
        self._waiter: Waiter = self._log.store.waiter([self._definition.changes, CATALOG])

    def _start(self, token: Token | None, why: str) -> None:
        if token is not None:
            why = self._too_old(token)
            try:
                if not why:
                    self._resume(token)
                    return
            except PositionLost as error:
                why = error.what
        self._begin()
        if why:
            self._source = itertools.chain([Change("reset", why=why)], self._source)

    def _too_old(self, token: Token) -> str:
        """Why a token is no place to go on from; nothing where it is one."""
        topic = self._log.topic(self._definition.changes)
        if token.generation != self._definition.generation or token.topic_id != topic.id:
            return (
                f"The view was rebuilt: generation {token.generation} is now generation {self._definition.generation}."
            )
        held = self._log.offsets(topic.name)
        if self._top is not None and (topic.compact or any(span.start for span in held.values())):
            return "The log no longer has the history that the order of the rows needs."
        for number, offset in token.positions.items():
            if not held[number].start <= offset <= held[number].stop:
                return f"The log no longer has the changes from offset {offset} on."
        if topic.compact:
            missing = self._log.read(topic.name, start=token.positions, columns=["_offset"]).num_rows
            if missing != sum(held[number].stop - offset for number, offset in token.positions.items()):
                return "The changes since the token were compacted."
        return ""

    def _resume(self, token: Token) -> None:
        topic = self._log.topic(self._definition.changes)
        self._follow(topic, token.starts(topic.name), token.positions)
        if self._top is not None:
            self._top.load(_keyed(fold(self._log, self._definition, token.positions)))
        self.token = str(token)

    def _begin(self) -> None:
        """The current rows, and a reader behind them."""
        snapshot = self._store.read(self._name, generation=self._definition.generation)
        applied = snapshot.stored.applied
        topic = self._log.topic(self._definition.changes)
        if applied.topic_id != topic.id:
            raise InvalidInput(
                f"{self._store.url} contains view {self._name!r} of another log.",
                advice="Open the log of the view's application. If the store is new, try again in a moment.",
            )
        for number, span in self._log.offsets(topic.name).items():
            check_not_missed(topic.name, number, applied.positions[number], first=span.start)
        self._follow(topic, applied.positions, applied.positions)
        rows: Iterable[Row] = _dicts(snapshot.rows.drop_columns([KEY]))
        if self._top is not None:
            self._top.load(_keyed(snapshot.rows))
            rows = self._top.seen()
        self._source = self._current(rows)

    def _follow(self, topic: Topic, start: Start, positions: Mapping[int, int]) -> None:
        self._reader = self._log.reader(topic.name, start=start, columns=_COLUMNS)
        self._token = Token(
            self._name, self._definition.generation, topic.id, dict(positions), self._log.store.incarnation()
        )

    # What comes next

    def _next(self, changes_max: int) -> list[Change]:
        if self._closed:
            raise Closed("The subscription was closed.", advice="Subscribe again with since=token.")
        found: list[Change] = []
        while len(found) < changes_max:
            change = next(self._source, None)
            if change is not None:
                found.append(change)
            elif found or not self._has_more():
                break
        now = time.monotonic()
        if found:
            self._heard = now
            self.token = found[-1].token or self.token
        elif self._heartbeat_s is not None and now - self._heard >= self._heartbeat_s:
            self._heard = now
            found = [Change("heartbeat", token=self.token)]
        return found

    def _has_more(self) -> bool:
        """Looks for changes, and only then for a swap: all changes of a generation come before it is replaced."""
        was_told = bool(self._catalog.lag())
        try:
            batches = [] if self._is_replaced else self._own(self._poll())
        except (EventsMissed, PositionLost) as error:
            self._again(error.what)
            return True
        if batches:
            self._source = itertools.chain.from_iterable(map(self._changes, batches))
            return True
        if not was_told and not self._is_replaced:
            return False
        self._catalog.seek("latest")
        now = ViewCatalog(self._log).get(self._name).current
        if now == self._definition.generation:
            return False
        self._again(f"The view was rebuilt: generation {self._definition.generation} is now generation {now}.")
        return True

    def _poll(self) -> list[pa.RecordBatch]:
        return self._reader.poll_arrow(events_max=_EVENTS_AT_ONCE, timeout_s=0)

    def _own(self, batches: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """The changes of this generation: those before what a swap appended to its topic."""
        own: list[pa.RecordBatch] = []
        for batch in batches:
            end = pc.index(batch.column("epoch"), SWAPPED).as_py()
            self._is_replaced = end >= 0
            own.append(batch.slice(0, end) if self._is_replaced else batch)
            if self._is_replaced:
                break
        return [batch for batch in own if batch.num_rows]

    def _again(self, why: str) -> None:
        for used in (self._reader, self._catalog, self._waiter):
            used.close()
        self._open(None, why=why)

    def _current(self, rows: Iterable[Row]) -> Iterator[Change]:
        for row in rows:
            yield Change("added", new=row)
        yield Change("ready", token=str(self._token))

    def _changes(self, batch: pa.RecordBatch) -> Iterator[Change]:
        """The changes of a batch, each with the place after it."""
        positions = self._token.positions
        told = batch.select(_COLUMNS[:-1])
        for key, old, new, partition, offset in zip(*(column.to_pylist() for column in told.columns), strict=True):
            positions[partition] = offset + 1
            step = (old, new) if self._top is None else self._top.change(key, new)
            if step is not None:
                before, after = step
                kind: Kind = "added" if before is None else "removed" if after is None else "changed"
                yield Change(kind, before, after, token=str(self._token))

    def _patience(self) -> float:
        """How long to wait at once; a heartbeat is not to be late."""
        if self._heartbeat_s is None:
            return WAIT_S_MAX
        return min(WAIT_S_MAX, max(0.0, self._heard + self._heartbeat_s - time.monotonic()))


def _dicts(rows: pa.Table) -> Iterator[Row]:
    for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE):
        yield from batch.to_pylist()


def _keyed(rows: pa.Table) -> Iterator[tuple[str, Row]]:
    return zip(rows.column(KEY).to_pylist(), _dicts(rows.drop_columns([KEY])), strict=True)
