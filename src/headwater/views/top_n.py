"""A top-N as a subscriber follows it: the first rows of a view in an order, and who enters and leaves with each change.

When a row leaves, the next one enters, whichever it is; so all rows are kept here, sorted. Nulls come last either way, NaN is
larger than every number, and rows that are equal in the order's columns stand by their key.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from headwater.views.changes import KEY

Row = dict[str, Any]
Step = tuple[Row | None, Row | None]
"""A row before and after; None where there is none."""


class _Descending:
    """Turns an order round."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: _Descending) -> bool:
        return bool(other.value < self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descending) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]


class RankedRows:
    """Rows by rank, of which the first `limit` are seen."""

    def __init__(self, order: Sequence[str], limit: int | None) -> None:
        self._order = [(column.removeprefix("-"), column.startswith("-")) for column in order]
        self._limit = limit
        self._ranks: list[tuple[Any, ...]] = []
        self._rows: dict[str, Row] = {}

    def load(self, rows: Iterable[tuple[str, Row]]) -> None:
        """Begins with these rows, given with their keys."""
        self._rows = dict(rows)
        self._ranks = sorted(self._rank(key, row) for key, row in self._rows.items())

    def keys(self) -> list[str]:
        """The keys of all rows, in their order."""
        return [rank[-1] for rank in self._ranks]

    def seen(self) -> list[Row]:
        """The first rows, in their order."""
        return [self._rows[rank[-1]] for rank in self._ranks[: self._limit]]

    def change(self, key: str, new: Row | None) -> Step | None:
        """Gives a key another row, or none; which of the rows that are seen leaves by that, and which one enters."""
        limit = len(self._ranks) + 1 if self._limit is None else self._limit
        old = self._rows.pop(key, None)
        was_seen = False
        if old is not None:
            at = bisect.bisect_left(self._ranks, self._rank(key, old))
            was_seen = at < limit
            del self._ranks[at]
        is_seen = False
        if new is not None:
            rank = self._rank(key, new)
            at = bisect.bisect_left(self._ranks, rank)
            is_seen = at < limit
            self._ranks.insert(at, rank)
            self._rows[key] = new
        if was_seen and is_seen:
            return old, new
        if was_seen:
            enters = self._ranks[limit - 1][-1] if len(self._ranks) >= limit else None
            return old, None if enters is None else self._rows[enters]
        if is_seen:
            leaves = self._ranks[limit][-1] if len(self._ranks) > limit else None
            return None if leaves is None else self._rows[leaves], new
        return None

    def _rank(self, key: str, row: Row) -> tuple[Any, ...]:
        parts: list[Any] = []
        for column, descending in self._order:
            value = row[column]
            if value is None:
                parts.append((1,))
                continue
            nan = isinstance(value, float) and math.isnan(value)
            plain = (nan, 0.0 if nan else value)
            parts.append((0, _Descending(plain) if descending else plain))
        return (*parts, key)


def ranked_keys(rows: pa.Table, order: Sequence[str]) -> pa.Array:
    """The keys of rows (with `_key`) in an order."""
    top = RankedRows(order, None)
    columns = [column.removeprefix("-") for column in order]
    top.load(zip(rows.column(KEY).to_pylist(), rows.select(columns).to_pylist(), strict=True))
    return pa.array(top.keys(), pa.string())
