"""Compiled searches: many queries as arrays, in which equal conditions are one.

A query is a formula: clauses that must all hold, each of literals of which one must hold, each of which may be negated. A literal is a
condition or another formula, so brackets are formulas in formulas.

    search → formula → clauses → literals → a word, a pattern, a pair, a phrase, a stretch, a place, an SQL condition, a formula

A **pair** is two words side by side in one field: a phrase of two words is a pair, a longer one has all of its pairs, and is looked at
closely only where they are there. Nothing here depends on documents. Parts can be joined without their texts being read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.processing.search.fields import HIGHEST, SearchFields
from headwater.processing.search.query import (
    ANY,
    Box,
    Circle,
    Clauses,
    Everything,
    Filled,
    Pattern,
    Phrase,
    Query,
    Stretch,
    Where,
    Word,
)

WORD, PATTERN, PAIR, PHRASE, STRETCH, PLACE, WHERE, FORMULA, TRUE = range(9)
"""What a literal is."""

_Array = Any
"""A NumPy array."""

_Literal = tuple[int, int, bool]


class ClauseTree(NamedTuple):
    """Formulas as ranges of clauses, clauses as ranges of literals."""

    clauses: _Array
    literals: _Array
    kind: _Array
    ref: _Array
    negated: _Array


class CompiledPhrase(NamedTuple):
    """A phrase by the numbers of its terms."""

    scope: int
    terms: tuple[int, ...]
    places: tuple[int, ...]
    slop: int


class CompiledSearches(NamedTuple):
    """Searches as arrays. A scope is 0 for any text, and a field's code + 1."""

    roots: _Array
    """The formula of each search."""
    formulas: ClauseTree
    terms: list[str]
    words: _Array
    """Of each its scope and its term."""
    patterns: list[tuple[int, Pattern]]
    pairs: _Array
    """Of each its scope and two terms."""
    phrases: list[CompiledPhrase]
    stretches: _Array
    """Of each the code of its numbers, and both bounds."""
    places: list[tuple[int, Circle | Box]]
    """Of each the field's code."""
    wheres: list[str]

    def __len__(self) -> int:
        return len(self.roots)

    @property
    def presences(self) -> int:
        """How many words, patterns and pairs there are: what a document has or has not."""
        return len(self.words) + len(self.patterns) + len(self.pairs)


class _Numbers:
    """Things with their numbers, each once."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def of(self, thing: Any) -> int:
        return self.known.setdefault(thing, len(self.known))


class Compiler:
    """Makes arrays of queries, one after the other."""

    def __init__(self, fields: SearchFields) -> None:
        self._scopes = {ANY: 0, **{name: code + 1 for code, name in enumerate(fields.kinds)}}
        self._kinds = fields.kinds
        self._tables = {kind: _Numbers() for kind in (WORD, PATTERN, PAIR, PHRASE, STRETCH, PLACE, WHERE)}
        self._terms = _Numbers()
        self._roots: list[int] = []
        self._formulas: list[list[list[_Literal]]] = []

    def add(self, query: Query) -> None:
        """One more search."""
        self._roots.append(self._formula(self._clauses(query)))

    def compiled(self) -> CompiledSearches:
        """All of them."""
        clauses = [clause for formula in self._formulas for clause in formula]
        literals = np.array([literal for clause in clauses for literal in clause], np.int64).reshape(-1, 3)
        formulas = ClauseTree(
            _starts([len(formula) for formula in self._formulas]), _starts([len(clause) for clause in clauses]),
            literals[:, 0].astype(np.int8), literals[:, 1], literals[:, 2].astype(bool),
        )  # fmt: skip
        known = {kind: list(table.known) for kind, table in self._tables.items()}
        return CompiledSearches(
            np.array(self._roots, np.int64), formulas, list(self._terms.known), _table(known[WORD], 2), known[PATTERN],
            _table(known[PAIR], 3), known[PHRASE], _table(known[STRETCH], 3), known[PLACE], known[WHERE],
        )  # fmt: skip

    def _formula(self, clauses: list[list[_Literal]]) -> int:
        self._formulas.append(clauses)
        return len(self._formulas) - 1

    def _clauses(self, query: Query) -> list[list[_Literal]]:
        """Clauses that must all hold."""
        if isinstance(query, Phrase):
            return self._phrase(query)
        if not isinstance(query, Clauses):
            return [[self._leaf(query)]]
        found = [clause for part in query.must for clause in self._clauses(part)]
        if not query.must:
            found.append([literal for part in query.should for literal in self._any(part)])
        for part in query.must_not:
            found += [[self._negated(literal)] for literal in self._any(part)]
        return found

    def _any(self, query: Query) -> list[_Literal]:
        """Literals of which one must hold."""
        clauses = self._clauses(query)
        return clauses[0] if len(clauses) == 1 else [(FORMULA, self._formula(clauses), False)]

    def _negated(self, literal: _Literal) -> _Literal:
        kind, ref, is_negated = literal
        return kind, ref, not is_negated

    def _leaf(self, query: Query) -> _Literal:
        match query:
            case Word():
                return self._literal(WORD, (self._scopes[query.field], self._terms.of(query.word)))
            case Stretch():
                return self._literal(STRETCH, (self._scopes[query.field] - 1, query.low, query.high))
            case Filled():
                return self._literal(STRETCH, (self._scopes[query.field] - 1 + len(self._kinds), 1, HIGHEST))
            case Circle() | Box():
                return self._literal(PLACE, (self._scopes[query.field] - 1, query))
            case Where():
                return self._literal(WHERE, query.sql)
            case Everything():
                return TRUE, 0, False
            case Clauses() | Phrase():
                raise AssertionError("is made of others")
            case _:
                return self._literal(PATTERN, (self._scopes[query.field], query))

    def _literal(self, kind: int, thing: Any) -> _Literal:
        return kind, self._tables[kind].of(thing), False

    def _phrase(self, query: Phrase) -> list[list[_Literal]]:
        scope, terms = self._scopes[query.field], tuple(map(self._terms.of, query.words))
        found, covered = [], set[int]()
        for at, (first, second) in enumerate(pairwise(terms)):
            if query.slop == 0 and query.places[at + 1] == query.places[at] + 1:
                found.append([self._literal(PAIR, (scope, first, second))])
                covered |= {at, at + 1}
        for at in range(len(terms)):
            if at not in covered:
                found.append([self._literal(WORD, (scope, terms[at]))])
        if len(terms) > 2 or not covered:
            found.append([self._literal(PHRASE, CompiledPhrase(scope, terms, query.places, query.slop))])
        return found


def compile_searches(queries: Sequence[Query], fields: SearchFields) -> CompiledSearches:
    """Queries as arrays, in their order."""
    compiler = Compiler(fields)
    for query in queries:
        compiler.add(query)
    return compiler.compiled()


def terms_array(searches: CompiledSearches) -> pa.StringArray:
    """The terms of searches, by their number."""
    return pa.array(searches.terms, pa.string())


def _starts(counts: Sequence[int]) -> _Array:
    return np.concatenate([[0], np.cumsum(np.array(counts, np.int64))]).astype(np.int64)


def _table(rows: list[tuple[int, ...]], width: int) -> _Array:
    return np.array(rows, np.int64).reshape(-1, width)
