"""`hw.why`: what of a search holds of one document, what does not, and what came nearest.

Whether a clause holds is decided by the matcher that decides it for streams. Only what came nearest is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headwater.processing.search.analysis import Analyzer, words_of
from headwater.processing.search.cells import distances_m
from headwater.processing.search.compiler import compile_searches
from headwater.processing.search.documents import Documents
from headwater.processing.search.fields import HIGHEST, LOWEST, NOTHING, SearchFields, shown_number
from headwater.processing.search.grammar import parse_search
from headwater.processing.search.matcher import Matcher
from headwater.processing.search.query import (
    ANY,
    Box,
    Circle,
    Clauses,
    Filled,
    Fuzzy,
    Phrase,
    Prefix,
    Query,
    Stretch,
    Where,
    Wildcard,
    Word,
    WordRange,
)
from headwater.processing.search.wildcards import edits_between


class Explanation(msgspec.Struct, frozen=True):
    """A clause: what it says, whether it holds, what the document has instead, and the clauses in it. Printed, it is a tree."""

    clause: str
    holds: bool
    nearest: str = ""
    parts: tuple[Explanation, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines(0))

    def _lines(self, depth: int) -> Iterator[str]:
        nearest = f" ({self.nearest})" if self.nearest else ""
        yield f"{'  ' * depth}{'yes' if self.holds else 'no '} {self.clause}{nearest}"
        for part in self.parts:
            yield from part._lines(depth + 1)


def why(
    query: str,
    document: Mapping[str, Any],
    *,
    text: str | Sequence[str] | None = None,
    language: str | None = None,
    places: Mapping[str, tuple[str, str]] | None = None,
) -> Explanation:
    """Why a search matches a document, or does not: each clause, whether it holds, and what came nearest.

    print(hw.why('bicycle AND price:<100', {"title": "Red bicycles", "price": 120}))

    `text` names the columns whose words are searched: all texts by default.
    """
    rows = pa.Table.from_pylist([dict(document)])
    rows = rows.cast(
        pa.schema([field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in rows.schema])
    )
    texts = [field.name for field in rows.schema if pa.types.is_string(field.type)] if text is None else text
    fields = SearchFields.of(rows.schema, [texts] if isinstance(texts, str) else texts, places)
    parsed = parse_search(query, fields, Analyzer(language))
    return _Explainer(rows, fields, Analyzer(language), parsed).explanation(parsed)


class _Explainer:
    """One document, and which clauses hold of it."""

    def __init__(self, rows: pa.Table, fields: SearchFields, analyzer: Analyzer, query: Query) -> None:
        self._row, self._fields = rows.to_pylist()[0], fields
        self._documents = Documents(rows, fields, analyzer)
        clauses = list(_all(query))
        matcher = Matcher(compile_searches(clauses, fields))
        always = np.full(len(clauses), HIGHEST)
        found = matcher.matches(self._documents, -always, always, np.zeros(1, np.int64))
        self._holding = {clauses[number] for number in found.search.tolist()}

    def explanation(self, query: Query, sign: str = "") -> Explanation:
        """A clause with those in it; what must not hold is said to hold where it does not."""
        is_held = query in self._holding
        holds = is_held if sign != "-" else not is_held
        if isinstance(query, Clauses):
            signs = (("+", query.must), ("", query.should), ("-", query.must_not))
            parts = tuple(self.explanation(part, each) for each, some in signs for part in some)
            return Explanation(f"{sign}(…)" if sign else "all clauses with +, none with -", holds, parts=parts)
        nearest = "" if is_held else self._nearest(query)
        return Explanation(sign + self._said(query), holds, nearest if holds == is_held else "")

    def _said(self, query: Query) -> str:
        field = getattr(query, "field", ANY)
        return (f"{field}:" if field else "") + self._said_of(query)

    def _said_of(self, query: Query) -> str:
        match query:
            case Word(word=word):
                return word if word.isalnum() else f'"{word}"'
            case Phrase(words=words, slop=slop):
                return f'"{" ".join(words)}"' + (f"~{slop}" if slop else "")
            case Prefix(start=start):
                return f"{start}*"
            case Wildcard(pieces=pieces):
                return "".join("*" if each == 0 else "?" if each == 1 else str(each) for each in pieces)
            case Fuzzy(word=word, edits=edits):
                return f"{word}~{edits}"
            case WordRange(low=low, high=high):
                return f"{'[' if query.with_low else '{'}{low or '*'} TO {high or '*'}{']' if query.with_high else '}'}"
            case Stretch(field=field, low=low, high=high):
                bounds = (
                    "*" if each in (LOWEST, HIGHEST) else shown_number(self._fields, field, each)
                    for each in (low, high)
                )
                return f"[{' TO '.join(bounds)}]"
            case Circle():
                return f"near({query.latitude}, {query.longitude}, {query.distance_m / 1000:g}km)"
            case Box():
                return f"box({query.south}, {query.west}, {query.north}, {query.east})"
            case Where(sql=sql):
                return sql
            case Filled():
                return "*"
            case _:
                return "*:*"

    def _nearest(self, query: Query) -> str:
        match query:
            case Word(word=word) | Fuzzy(word=word):
                return self._nearest_word(query.field, word)
            case Phrase():
                return self._nearest_phrase(query)
            case Prefix() | Wildcard() | WordRange():
                return f"words are {', '.join(self._words(query.field)[:10]) or 'none'}"
            case Stretch(field=field):
                number = int(self._documents.numbers(list(self._fields.kinds).index(field))[0])
                return f"{field} is {'null' if number == NOTHING else shown_number(self._fields, field, number)}"
            case Circle() | Box():
                return self._nearest_place(query)
            case Filled(field=field):
                return f"{field} has no value"
            case _:
                return ""

    def _words(self, field: str) -> list[str]:
        """The words of a field as they are written, each once."""
        fields = self._fields.texts if field == ANY else [field]
        values = [self._row[each] for each in fields if self._row[each] is not None]
        if field != ANY and self._fields.kinds[field] == "name":
            return values
        return list(dict.fromkeys(word for value in values for word in words_of(value)))

    def _nearest_word(self, field: str, word: str) -> str:
        words = self._words(field)
        if not words:
            return f"{field or 'the document'} has no words"
        edits = edits_between(pa.array(words, pa.string()), word)
        best = int(np.argmin(edits))
        return f"nearest: {words[best]}, {int(edits[best])} edits away"

    def _nearest_phrase(self, query: Phrase) -> str:
        terms = {
            str(self._documents.terms[number])
            for words in self._documents.words
            if (query.field == ANY and words.is_text) or list(self._fields.kinds)[words.code] == query.field
            for number in words.number.tolist()
        }
        missing = [word for word in dict.fromkeys(query.words) if word not in terms]
        return f"missing: {', '.join(missing)}" if missing else "all words are there, but not so near each other"

    def _nearest_place(self, query: Circle | Box) -> str:
        latitude, longitude = self._documents.place(list(self._fields.kinds).index(query.field))
        if not np.isfinite(latitude[0]):
            return f"{query.field} has no coordinates on the earth"
        if isinstance(query, Box):
            return f"{query.field} is at {latitude[0]:g}, {longitude[0]:g}"
        away = float(distances_m(latitude, longitude, query.latitude, query.longitude)[0])
        return f"{query.field} is {away / 1000:.3g} km away"


def _all(query: Query) -> Iterator[Query]:
    """A query and all queries in it, each as often as it is there."""
    yield query
    if isinstance(query, Clauses):
        for part in (*query.must, *query.should, *query.must_not):
            yield from _all(part)
