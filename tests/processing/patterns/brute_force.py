"""Row patterns by brute force: the standard read word by word, in plain Python, for few rows.

A pattern is nested tuples, each written into the text of a pattern by `text_of` and searched for by `_ways`, which tries everything in the
order of preference. Nothing is shared with the package: neither the grammar, nor the automaton, nor the expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

Row = dict[str, Any]
Part = tuple[Any, ...]
Path = tuple[tuple[int, str, bool], ...]
"""The rows of a match so far: the row's number, its variable, and whether it is left out of the output."""


class Here(NamedTuple):
    """Where an expression is evaluated: the partition, the rows of the match so far, and the number of the match."""

    rows: Sequence[Row]
    path: Path
    number: int = 0
    whole: Path | None = None
    """All rows of the match, for FINAL."""

    def of(self, variables: Sequence[str] | None, *, final: bool = False) -> list[int]:
        """The rows of some variables, or all."""
        path = self.whole if final and self.whole is not None else self.path
        return [row for row, name, _ in path if variables is None or name in variables]

    def first(self, column: str, variables: Sequence[str] | None = None, skip: int = 0, by: int = 0, *, final: bool = False) -> Any:  # fmt: skip  # noqa: E501
        """FIRST, and PREV or NEXT around it."""
        found = self.of(variables, final=final)
        return self._value(column, found[skip] if skip < len(found) else None, by)

    def last(self, column: str, variables: Sequence[str] | None = None, skip: int = 0, by: int = 0, *, final: bool = False) -> Any:  # fmt: skip  # noqa: E501
        """LAST, and PREV or NEXT around it."""
        found = self.of(variables, final=final)
        return self._value(column, found[-1 - skip] if skip < len(found) else None, by)

    def _value(self, column: str, row: int | None, by: int) -> Any:
        if row is None or not 0 <= row + by < len(self.rows):
            return None
        return self.rows[row + by][column]


Condition = Callable[[Here], Any]


class Search(NamedTuple):
    """What is searched for."""

    pattern: Part
    define: Mapping[str, Condition]
    within: int | None = None
    skip: tuple[str, Sequence[str]] = ("past", ())
    at: str = "at"


def text_of(part: Part) -> str:
    """The part as the text of a pattern."""
    kind = part[0]
    if kind == "var":
        return str(part[1])
    if kind == "empty":
        return "()"
    if kind in ("begin", "end"):
        return "^" if kind == "begin" else "$"
    if kind == "seq":
        return " ".join(f"({text_of(each)})" if each[0] == "alt" else text_of(each) for each in part[1])
    if kind == "alt":
        return " | ".join(map(text_of, part[1]))
    if kind == "perm":
        return f"PERMUTE({', '.join(map(text_of, part[1]))})"
    if kind == "out":
        return f"{{- {text_of(part[1])} -}}"
    _, each, least, most, is_greedy = part
    signs = {(0, 1): "?", (0, None): "*", (1, None): "+"}
    sign = signs.get((least, most)) or f"{{{least},{'' if most is None else most}}}"
    return f"({text_of(each)}){sign}{'' if is_greedy else '?'}"


def matches_of(search: Search, rows: Sequence[Row]) -> list[Path | tuple[int]]:
    """All matches of one partition: their paths, or of an empty match its row's number in a tuple."""
    found = list[Any]()
    start = 0
    while start < len(rows):
        path = _match(search, rows, start)
        if path is not None:
            found.append(path or (start,))
        start = _next(search, start, path)
    return found


def _match(search: Search, rows: Sequence[Row], start: int) -> Path | None:
    """The preferred match that begins at a row; an empty path where it has no rows."""
    ways = _ways(search, rows, search.pattern, start, (), start, hidden=False)
    return next((path for _, path in ways), None)


def _next(search: Search, start: int, path: Path | None) -> int:
    if not path or search.skip[0] == "next":
        return start + 1
    if search.skip[0] == "past":
        return path[-1][0] + 1
    named = [row for row, name, _ in path if name in search.skip[1]]
    return named[0] if search.skip[0] == "first" else named[-1]


def _ways(
    search: Search, rows: Sequence[Row], part: Part, at: int, path: Path, start: int, *, hidden: bool
) -> Iterator[tuple[int, Path]]:
    """All ways to go through a part from a row on, in the order of preference: the next row, and the path."""
    kind = part[0]
    if kind == "var":
        if at >= len(rows) or (
            search.within is not None and rows[at][search.at] - rows[start][search.at] > search.within
        ):
            return
        longer = (*path, (at, part[1], hidden))
        if part[1] not in search.define or search.define[part[1]](Here(rows, longer)) is True:
            yield at + 1, longer
    elif kind == "empty" or (kind == "begin" and at == 0) or (kind == "end" and at == len(rows)):
        yield at, path
    elif kind == "seq":
        yield from _sequence(search, rows, part[1], at, path, start, hidden=hidden)
    elif kind == "alt":
        for each in part[1]:
            yield from _ways(search, rows, each, at, path, start, hidden=hidden)
    elif kind == "perm":
        for order in permutations(part[1]):
            yield from _sequence(search, rows, order, at, path, start, hidden=hidden)
    elif kind == "out":
        yield from _ways(search, rows, part[1], at, path, start, hidden=True)
    elif kind == "rep":
        yield from _repeated(search, rows, part, 0, at, path, start, hidden=hidden)


def _sequence(
    search: Search, rows: Sequence[Row], parts: Sequence[Part], at: int, path: Path, start: int, *, hidden: bool
) -> Iterator[tuple[int, Path]]:
    if not parts:
        yield at, path
        return
    for after, longer in _ways(search, rows, parts[0], at, path, start, hidden=hidden):
        yield from _sequence(search, rows, parts[1:], after, longer, start, hidden=hidden)


def _repeated(
    search: Search, rows: Sequence[Row], part: Part, done: int, at: int, path: Path, start: int, *, hidden: bool
) -> Iterator[tuple[int, Path]]:
    _, each, least, most, is_greedy = part
    if done >= least and not is_greedy:
        yield at, path
    if most is None or done < most:
        for after, longer in _ways(search, rows, each, at, path, start, hidden=hidden):
            if after > at or done < least:
                yield from _repeated(search, rows, part, done + 1, after, longer, start, hidden=hidden)
    if done >= least and is_greedy:
        yield at, path
