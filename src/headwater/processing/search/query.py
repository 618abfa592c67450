"""A query: what a saved search looks for, as frozen structs. `grammar` reads them from text.

    Query
    ├── Word, Prefix, Wildcard, Fuzzy, WordRange    one word of a field
    ├── Phrase                                      words near each other in one field
    ├── Stretch                                     a number, time or truth between two bounds
    ├── Circle, Box                                 coordinates within a distance, or inside a box
    ├── Filled                                      the field has a value
    ├── Everything                                  every document
    ├── Where                                       an SQL condition over the document's columns
    └── Clauses                                     queries that must, may or must not hold

The field of a word is a column, or `ANY`: any of the columns with text. Words are analysed: in lower case, without stop words, stemmed.
Bounds are numbers in the order of their column's values (see `fields`), both inclusive.

`Clauses` holds where all of `must` and none of `must_not` hold, and, without `must`, one at least of `should`. This is the rule of
Lucene: beside a required clause the optional ones decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

ANY = ""
"""The field of words that any column with text may have."""


class Word(msgspec.Struct, frozen=True, tag="w", array_like=True):
    """A word."""

    field: str
    word: str


class Phrase(msgspec.Struct, frozen=True, tag="p", array_like=True):
    """Words with their places, of which stop words leave gaps. `slop` is how far they may be displaced altogether."""

    field: str
    words: tuple[str, ...]
    places: tuple[int, ...]
    slop: int = 0


class Prefix(msgspec.Struct, frozen=True, tag="x", array_like=True):
    """A word that begins so, as it is written."""

    field: str
    start: str


class Wildcard(msgspec.Struct, frozen=True, tag="*", array_like=True):
    """A word like this, as it is written: a text is itself, 1 is any sign, 0 any signs."""

    field: str
    pieces: tuple[str | int, ...]


class Fuzzy(msgspec.Struct, frozen=True, tag="~", array_like=True):
    """A word, as it is written, that at most so many edits make of this one. Swapped neighbours are one edit."""

    field: str
    word: str
    edits: int


class WordRange(msgspec.Struct, frozen=True, tag="r", array_like=True):
    """A word, as it is written, between two others in the order of their code points."""

    field: str
    low: str | None
    high: str | None
    with_low: bool
    with_high: bool


class Stretch(msgspec.Struct, frozen=True, tag="n", array_like=True):
    """A value between two bounds, both inclusive."""

    field: str
    low: int
    high: int


class Circle(msgspec.Struct, frozen=True, tag="c", array_like=True):
    """Coordinates, in degrees, within a distance."""

    field: str
    latitude: float
    longitude: float
    distance_m: float


class Box(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """Coordinates between two parallels and two meridians, in degrees. With `west` above `east` it lies across the date line."""

    field: str
    south: float
    west: float
    north: float
    east: float


class Filled(msgspec.Struct, frozen=True, tag="f", array_like=True):
    """The field is not null, and of a text it has a word."""

    field: str


class Everything(msgspec.Struct, frozen=True, tag="e", array_like=True):
    """Every document."""


class Where(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """An SQL condition over the document's columns."""

    sql: str


class Clauses(msgspec.Struct, frozen=True, tag="q", array_like=True):
    """Queries that together are one."""

    must: tuple[Query, ...] = ()
    should: tuple[Query, ...] = ()
    must_not: tuple[Query, ...] = ()


Pattern = Prefix | Wildcard | Fuzzy | WordRange
"""What is compared with words as they are written."""

Query = (
    Word
    | Phrase
    | Prefix
    | Wildcard
    | Fuzzy
    | WordRange
    | Stretch
    | Circle
    | Box
    | Filled
    | Everything
    | Where
    | Clauses
)


def required(query: Query, more: Query) -> Clauses:
    """A query of which both parts must hold."""
    return Clauses(must=(query, more))


def leaves(query: Query, *, is_negative: bool = False) -> Iterator[tuple[Query, bool]]:
    """The queries that are not made of others, and whether each is negated."""
    if not isinstance(query, Clauses):
        yield query, is_negative
        return
    for part in (*query.must, *query.should):
        yield from leaves(part, is_negative=is_negative)
    for part in query.must_not:
        yield from leaves(part, is_negative=not is_negative)


def encoded(query: Query) -> bytes:
    """The query as bytes, for a state."""
    return msgspec.msgpack.encode(query)


def decoded(data: bytes) -> Query:
    """The query that `encoded` gave."""
    return msgspec.msgpack.decode(data, type=Query)
