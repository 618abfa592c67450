"""Highlights: where in its texts a document has what a search looks for.

A highlight is a field with the first character of a word and the one after the last. There is one for each word, prefix, pattern or
phrase that does not have to be absent. It is computed for pairs that match, when they are asked for, match by match in Python: the places
of words in texts are needed for nothing else, so the index does not have them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa

from headwater.processing.search.analysis import Analyzer, words_of
from headwater.processing.search.fields import SearchFields
from headwater.processing.search.query import (
    ANY,
    Fuzzy,
    Phrase,
    Prefix,
    Query,
    Wildcard,
    Word,
    WordRange,
    leaves,
)
from headwater.processing.search.wildcards import pattern_hits

HIGHLIGHTS = pa.list_(pa.struct([("field", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))
HIGHLIGHTS_MAX = 1_000
"""A match has at most so many."""

_ASCII_WORD = re.compile("[A-Za-z0-9]+")


class _Found(NamedTuple):
    """A word of a text: as it is written, as it is searched, and from where to where it goes."""

    written: str
    term: str | None
    start: int
    end: int


class Highlighter:
    """Finds what searches look for in documents."""

    def __init__(self, fields: SearchFields, analyzer: Analyzer) -> None:
        self._fields, self._analyzer = fields, analyzer

    def words(self, document: Mapping[str, Any]) -> dict[str, list[_Found]]:
        """The words of a document's texts."""
        return {name: list(self._found(document[name])) for name in self._fields.texts if document[name] is not None}

    def of(self, words: Mapping[str, list[_Found]], query: Query) -> list[dict[str, Any]]:
        """The highlights of a search, in the order of fields and places."""
        wanted = [leaf for leaf, is_negative in leaves(query) if not is_negative]
        found = [
            {"field": field, "start": found.start, "end": found.end}
            for field, mine in words.items()
            for at in sorted({at for leaf in wanted for at in _places(leaf, field, mine)})
            for found in [mine[at]]
        ]
        return found[:HIGHLIGHTS_MAX]

    def _found(self, text: str) -> Iterator[_Found]:
        for start, end in _spans(text):
            for written in words_of(text[start:end]):
                yield _Found(written, self._analyzer.term(written), start, end)


def _places(leaf: Query, field: str, words: list[_Found]) -> Iterator[int]:
    """Which words of a field a search looks for."""
    if getattr(leaf, "field", None) not in (ANY, field):
        return
    match leaf:
        case Word(word=word):
            yield from (at for at, found in enumerate(words) if found.term == word)
        case Phrase():
            yield from _phrase(leaf, words)
        case Prefix() | Wildcard() | Fuzzy() | WordRange():
            yield from (at for at, found in enumerate(words) if _matches(leaf, found.written))
        case _:
            pass


def _phrase(phrase: Phrase, words: list[_Found]) -> Iterator[int]:
    """The words of a phrase, wherever they are near each other: of each the first that is."""
    wanted = list(zip(phrase.words, phrase.places, strict=True))
    origins = {at - place for at, found in enumerate(words) for word, place in wanted if found.term == word}
    for origin in sorted(origins):
        taken: list[int] = []
        for word, place in sorted(wanted, key=lambda each: each[1]):
            reach = range(max(0, origin + place), min(len(words), origin + place + phrase.slop + 1))
            free = (at for at in reach if words[at].term == word and at not in taken)
            taken += [at for _, at in zip("1", free, strict=False)]
        if len(taken) == len(wanted):
            yield from taken


@lru_cache(65_536)
def _matches(pattern: Prefix | Wildcard | Fuzzy | WordRange, word: str) -> bool:
    return len(pattern_hits(pa.array([word], pa.string()), [pattern])[0]) > 0


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where words are: runs of letters, marks and digits."""
    if text.isascii():
        yield from (match.span() for match in _ASCII_WORD.finditer(text))
        return
    for is_word, run in groupby(enumerate(text), key=lambda each: unicodedata.category(each[1])[0] in "LMN"):
        if is_word:
            places = [at for at, _ in run]
            yield places[0], places[-1] + 1
