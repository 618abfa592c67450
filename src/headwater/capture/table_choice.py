"""The choice of tables: which of a database are captured, and by which key. What PostgreSQL and MariaDB have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from headwater.model.errors import NotCapturable

T = TypeVar("T")
Key = tuple[str, ...]


def with_keys(
    tables: Mapping[str, T],
    names: Sequence[str],
    keys: Mapping[str, Sequence[str]],
    key_of: Callable[[T, Sequence[str]], Key],
) -> tuple[dict[str, Key], dict[str, str]]:
    """The keys of the tables that are named, or of all that can be captured; and why the others cannot."""
    if names:
        return {name: key_of(tables[name], keys.get(name, ())) for name in names}, {}
    found, left_out = {}, {}
    for name, table in tables.items():
        try:
            found[name] = key_of(table, keys.get(name, ()))
        except NotCapturable as error:
            left_out[name] = str(error)
    return found, left_out


def nothing_to_capture(shown: str) -> NotCapturable:
    """No table has what it takes."""
    return NotCapturable(
        f"{shown} has no table that can be captured.",
        advice="Give a table a primary key: ALTER TABLE … ADD PRIMARY KEY (…);",
    )


def not_captured(table: str) -> NotCapturable:
    """A table was captured, and is no more."""
    return NotCapturable(f"Table {table} is not captured any more.", advice="See `headwater capture status`.")
