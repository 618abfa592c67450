"""The index of saved searches: every version of every search that a document may still be matched with.

A version holds from its time until that of the next one of the same search; of several at one time the last that came counts. Versions
are compiled in **parts**: a change is a small part of its own, and parts of about the same size become one, so there are few. A part keeps
versions that are over until it becomes one with another; their times leave them out.

The index is derived: it can be made again of the rows that a state keeps. A process keeps the last ones that it made, and adds what is
new; `stamp` says of which rows an index was made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.model.clock import NO_TIME
from headwater.processing.search.compiler import compile_searches
from headwater.processing.search.documents import Documents
from headwater.processing.search.fields import SearchFields
from headwater.processing.search.joint import joined
from headwater.processing.search.matcher import FoundPairs, Matcher
from headwater.processing.search.query import decoded
from headwater.processing.state.sorted_runs import AT, H1, H2, column, tidied

NEVER = 2**63 - 1
SINCE, GONE, QUERY = "since", "gone", "query"
"""The columns of a version: from when it holds, whether the search is removed with it, and the query (null where it is parked)."""

CHUNKS_MAX = 64
_Array = Any
"""A NumPy array."""


class IndexStamp(NamedTuple):
    """Which versions an index was made of: how many there were, and a digest of them all."""

    versions: int
    digest: int


class _Part(NamedTuple):
    """Some versions, compiled: the matcher's searches are those with these numbers."""

    matcher: Matcher
    number: _Array


class _Columns(NamedTuple):
    """What of versions is looked at in every batch: key, time, order, and whether there is a query, or one that is parked."""

    h1: _Array
    h2: _Array
    since: _Array
    order: _Array
    is_live: _Array
    is_parked: _Array

    @classmethod
    def of(cls, versions: pa.Table) -> _Columns:
        has_query, is_gone = np.asarray(versions.column(QUERY).is_valid()), column(versions, GONE).astype(bool)
        h1, h2, since, order = (column(versions, name) for name in (H1, H2, SINCE, AT))
        return cls(h1, h2, since, order, has_query & ~is_gone, ~has_query & ~is_gone)

    def before(self, more: _Columns) -> _Columns:
        return _Columns(*(np.concatenate(pair) for pair in zip(self, more, strict=True)))

    def only(self, which: _Array) -> _Columns:
        return _Columns(*(each[which] for each in self))


class SearchIndex:
    """The versions of searches, and which match."""

    def __init__(self, fields: SearchFields, schema: pa.Schema) -> None:
        """`schema` is that of versions, with `_at`, the number of each in the order in which they came."""
        self.stamp = IndexStamp(0, 0)
        self.forgotten = NO_TIME
        self._fields = fields
        self._versions = schema.empty_table()
        self._columns = _Columns.of(self._versions)
        self._until = np.zeros(0, np.int64)
        self._parts: list[_Part] = []

    def __len__(self) -> int:
        return len(self._until)

    @property
    def searches(self) -> int:
        """How many searches there are that the last version did not remove or park."""
        return int(np.count_nonzero(self._columns.is_live & (self._until == NEVER)))

    @property
    def parked(self) -> int:
        """How many searches are parked by their last version."""
        return int(np.count_nonzero(self._columns.is_parked & (self._until == NEVER)))

    @property
    def always(self) -> int:
        """How many versions are checked with every document."""
        return sum(part.matcher.always for part in self._parts)

    def numbers(self) -> _Array:
        """The versions that may still be needed, by their order."""
        return np.sort(self._columns.order)

    def add(self, versions: pa.Table, stamp: IndexStamp) -> None:
        """Adds versions that came after all others."""
        start = len(self)
        self.stamp = stamp
        if not versions.num_rows:
            return
        whole = pa.concat_tables([self._versions, versions.select(self._versions.schema.names)])
        self._versions = whole.combine_chunks() if whole.column(0).num_chunks > CHUNKS_MAX else whole
        self._columns = self._columns.before(_Columns.of(versions))
        self._until = np.concatenate([self._until, np.full(versions.num_rows, NEVER)])
        self._end(start)
        fresh = np.arange(start, len(self))[self._columns.is_live[start:]]
        count = tidied([*(len(part.number) for part in self._parts), len(fresh)]) - 1
        older = self._parts[len(self._parts) - count :] if count > 0 else []
        self._parts = self._parts[: len(self._parts) - len(older)]
        self._parts += self._joined([*older, *self._fresh(fresh)])

    def _end(self, start: int) -> None:
        """Says of the searches that have versions from `start` on until when each of their versions holds."""
        changed = np.unique(self._columns.h1[start:])
        place = np.minimum(np.searchsorted(changed, self._columns.h1), len(changed) - 1)
        number = np.flatnonzero(changed[place] == self._columns.h1)
        self._until[number] = _ends(self._columns.only(number))

    def forget(self, before: int) -> None:
        """Forgets versions that were over at a time: no document is matched at or before it any more."""
        is_needed = (self._until > before) & (self._until > self._columns.since)
        if bool(is_needed.all()) or np.count_nonzero(~is_needed) * 4 < len(is_needed):
            return
        self.forgotten = before
        place = np.cumsum(is_needed) - 1
        self._versions, self._until = self._versions.filter(pa.array(is_needed)), self._until[is_needed]
        self._columns = self._columns.only(is_needed)
        parts = list[_Part]()
        for part in self._parts:
            kept = is_needed[part.number]
            parts += [part] if bool(kept.all()) else self._kept([part], [kept])
        self._parts = [part._replace(number=place[part.number]) for part in parts]

    def matches(self, documents: Documents, times: _Array, *, is_equal: bool) -> FoundPairs:
        """Pairs of a document and a version, by the document's time; with `is_equal` a version holds at its own time."""
        since = self._columns.since + (0 if is_equal else 1)
        until = np.where(self._until == NEVER, NEVER, self._until + (0 if is_equal else 1))
        found = []
        for part in self._parts:
            row, search = part.matcher.matches(documents, since[part.number], until[part.number], times)
            found.append((row, part.number[search]))
        row = np.concatenate([np.zeros(0, np.int64), *(row for row, _ in found)])
        number = np.concatenate([np.zeros(0, np.int64), *(number for _, number in found)])
        order = np.lexsort((self._columns.order[number], row))
        return FoundPairs(row[order], number[order])

    def rows(self, number: _Array) -> pa.Table:
        """Versions."""
        return self._versions.take(pa.array(number))

    def _fresh(self, numbers: _Array) -> list[_Part]:
        """Versions that were not compiled before."""
        if not len(numbers):
            return []
        queries = self._versions.column(QUERY).take(pa.array(numbers)).to_pylist()
        return [_Part(Matcher(compile_searches([decoded(query) for query in queries], self._fields)), numbers)]

    def _joined(self, parts: list[_Part]) -> list[_Part]:
        """Parts as one, without versions that no time falls in any more."""
        since = self._columns.since
        return (
            parts
            if len(parts) == 1
            else self._kept(parts, [self._until[part.number] > since[part.number] for part in parts])
        )

    def _kept(self, parts: list[_Part], kept: list[_Array]) -> list[_Part]:
        """One part of what is kept of some; none where that is nothing."""
        numbers = np.concatenate(
            [np.zeros(0, np.int64), *(part.number[keep] for part, keep in zip(parts, kept, strict=True))]
        )
        if not len(numbers):
            return []
        chosen = [np.flatnonzero(keep) for keep in kept]
        return [_Part(Matcher(joined([part.matcher.searches for part in parts], chosen)), numbers)]


class IndexShelf:
    """The indexes that a process keeps, by what they were made of."""

    def __init__(self, make: Callable[[], SearchIndex], size: int = 4) -> None:
        self._make, self._size = make, size
        self._kept: list[SearchIndex] = []

    def take(self, stamps: set[IndexStamp], before: int) -> SearchIndex:
        """The newest index that was made of rows with one of these stamps and forgot nothing later than a time, or an empty one."""
        fitting = [index for index in self._kept if index.stamp in stamps and index.forgotten <= before]
        index = max(fitting, key=lambda each: each.stamp.versions, default=None) or self._make()
        self._kept = [index, *(each for each in self._kept if each is not index)][: self._size]
        return index


def _ends(versions: _Columns) -> _Array:
    """Until when each version holds: the time of the next of the same search, or of one at the same time that came later."""
    order = np.lexsort((versions.order, versions.since, versions.h2, versions.h1))
    h1, h2 = versions.h1[order], versions.h2[order]
    is_same = (h1[1:] == h1[:-1]) & (h2[1:] == h2[:-1])
    found = np.full(len(order), NEVER)
    found[order[:-1][is_same]] = versions.since[order[1:][is_same]]
    return found
