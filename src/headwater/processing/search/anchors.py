"""Anchors: under what each search stands, so that a document finds it. It is the rarest thing that the search cannot match without.

Every clause of a search must hold, so the literals of one clause are enough: a document that has none of them cannot match. The clause is
chosen whose literals documents have least often, as far as has been seen. A clause with a literal that is negated, or is an SQL condition,
cannot be one. A literal that is a formula stands under the anchors of that formula.

What a literal is found by: a word, a pattern or a pair by itself; a stretch of numbers by the nodes of a tree over all bounds of its
field, a few for each stretch; a place by cells of the map. Searches without such a clause are checked with every document (`always`).

Anchors decide how long matching takes, never what matches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headwater.processing.search.cells import Shapes, cover
from headwater.processing.search.compiler import (
    FORMULA,
    PAIR,
    PATTERN,
    PLACE,
    STRETCH,
    TRUE,
    WHERE,
    WORD,
    ClauseTree,
    CompiledSearches,
)
from headwater.processing.state.sorted_runs import positions

BOUNDS_MAX = 4_096
"""A tree has at most so many leaves; more bounds share some."""

_Array = Any
"""A NumPy array."""


class Postings(NamedTuple):
    """Searches by a key: the keys in order, and for each where its searches begin."""

    keys: _Array
    starts: _Array
    searches: _Array

    @classmethod
    def of(cls, keys: _Array, searches: _Array) -> Postings:
        """Pairs of a key and a search in any order."""
        order = np.lexsort((searches, keys))
        keys, searches = keys[order], searches[order]
        if len(keys):
            is_new = np.r_[True, (keys[1:] != keys[:-1]) | (searches[1:] != searches[:-1])]
            keys, searches = keys[is_new], searches[is_new]
        found, starts = np.unique(keys, return_index=True)
        return cls(found, np.append(starts, len(keys)), searches)

    def find(self, keys: _Array) -> tuple[_Array, _Array]:
        """For keys the number of each that is known, and its place among the known ones."""
        if not len(self.keys):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        hit = np.flatnonzero(self.keys[place] == keys)
        return hit, place[hit]


class StretchTree(NamedTuple):
    """The stretches of one field: leaves lie between bounds, and nodes above them are numbered as in a heap."""

    code: int
    bounds: _Array
    leaves: int
    postings: Postings


class Anchors(NamedTuple):
    """Where searches stand, and what of them is left to check."""

    by_presence: Postings
    trees: list[StretchTree]
    by_cell: Postings
    cell_levels: list[tuple[int, int]]
    """The field and the level of the cells that there are."""
    always: _Array
    checks: _Array
    """For each search where its clauses begin in `check_clauses`: all but the one that its anchor shows to hold."""
    check_clauses: _Array


class Seen(NamedTuple):
    """How often documents had what searches look for, out of `documents`."""

    presences: _Array
    stretches: _Array
    documents: int


def anchors_of(searches: CompiledSearches, seen: Seen) -> Anchors:
    """The anchors that are the rarest by what was seen."""
    formulas = searches.formulas
    costs = _Costs(searches, seen)
    best = costs.best[searches.roots]
    is_found = best >= 0
    always = np.flatnonzero(~is_found)
    search, literal = _literals(formulas, costs.best, np.flatnonzero(is_found), best[is_found])
    kind, ref = formulas.kind[literal], formulas.ref[literal]
    offsets = presence_offsets(searches)
    is_presence = kind <= PAIR
    by_presence = Postings.of(ref[is_presence] + offsets[kind[is_presence]], search[is_presence])
    trees = _trees(searches, search[kind == STRETCH], ref[kind == STRETCH])
    by_cell, levels = _cells(searches, search[kind == PLACE], ref[kind == PLACE])
    checks, check_clauses = _checks(formulas, searches.roots, best, costs)
    return Anchors(by_presence, trees, by_cell, levels, always, checks, check_clauses)


def presence_offsets(searches: CompiledSearches) -> _Array:
    """Where words, patterns and pairs begin among all that a document has or has not."""
    return np.array([0, len(searches.words), len(searches.words) + len(searches.patterns)])


class _Costs:
    """How many documents have a literal, a clause, a formula, by what was seen; infinite for what is no anchor."""

    def __init__(self, searches: CompiledSearches, seen: Seen) -> None:
        self._formulas = formulas = searches.formulas
        offsets, kind, ref = presence_offsets(searches), formulas.kind, formulas.ref
        self.literals = np.full(len(kind), np.inf)
        for each in (WORD, PATTERN, PAIR):
            mine = kind == each
            self.literals[mine] = seen.presences[ref[mine] + offsets[each]]
        mine = kind == STRETCH
        self.literals[mine] = seen.stretches[ref[mine]] + 1
        self.literals[kind == PLACE] = seen.documents / 16
        self.literals[formulas.negated | np.isin(kind, (TRUE, WHERE))] = np.inf
        self.best = np.full(len(formulas.clauses) - 1, -1)
        self._nested()

    def _nested(self) -> None:
        """From the inside: a formula is made after those in it, so its number is higher."""
        formulas = self._formulas
        is_inner = (formulas.kind == FORMULA) & ~formulas.negated
        self.literals[is_inner] = np.inf
        depth = _depths(formulas)
        self.clauses = np.zeros(0)
        for level in range(int(depth.max(initial=0)) + 1):
            self.clauses = _sums(self.literals, formulas.literals)
            self._choose(np.flatnonzero(depth == level))
            known = is_inner & (depth[np.where(is_inner, formulas.ref, 0)] == level)
            best = self.best[formulas.ref[known]]
            self.literals[known] = np.where(best >= 0, self.clauses[best], np.inf)

    def _choose(self, numbers: _Array) -> None:
        start, end = self._formulas.clauses[numbers], self._formulas.clauses[numbers + 1]
        clause, number = positions(start, end)
        order = np.lexsort((self.clauses[clause], number))
        first = np.searchsorted(number, np.arange(len(numbers)))
        has = end > start
        chosen = clause[order][np.where(has, first, 0)] if len(clause) else np.zeros(len(numbers), np.int64)
        has[has] = np.isfinite(self.clauses[chosen[has]])
        self.best[numbers] = np.where(has, chosen, -1)


def _depths(formulas: ClauseTree) -> _Array:
    """How many formulas lie in a formula, one in the other."""
    count = len(formulas.clauses) - 1
    literal = np.flatnonzero(formulas.kind == FORMULA)
    owner = np.searchsorted(formulas.clauses, np.searchsorted(formulas.literals, literal, "right") - 1, "right") - 1
    depth = np.zeros(count, np.int64)
    while True:
        deeper = depth.copy()
        np.maximum.at(deeper, owner, depth[formulas.ref[literal]] + 1)
        if bool((deeper == depth).all()):
            return depth
        depth = deeper


def _sums(values: _Array, starts: _Array) -> _Array:
    if len(starts) < 2:
        return np.zeros(0)
    found = np.add.reduceat(np.append(values, 0.0), np.minimum(starts[:-1], len(values)))
    return np.where(starts[1:] > starts[:-1], found, np.inf)


def _literals(formulas: ClauseTree, best: _Array, search: _Array, clause: _Array) -> tuple[_Array, _Array]:
    """The literals under which searches stand, through formulas in formulas."""
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    while len(clause):
        literal, number = positions(formulas.literals[clause], formulas.literals[clause + 1])
        search = search[number]
        is_inner = formulas.kind[literal] == FORMULA
        found.append((search[~is_inner], literal[~is_inner]))
        search, clause = search[is_inner], best[formulas.ref[literal[is_inner]]]
    return np.concatenate([search for search, _ in found]), np.concatenate([literal for _, literal in found])


def _checks(formulas: ClauseTree, roots: _Array, best: _Array, costs: _Costs) -> tuple[_Array, _Array]:
    """The clauses of searches, the rarest first, without those whose holding an anchor shows."""
    clause, search = positions(formulas.clauses[roots], formulas.clauses[roots + 1])
    is_shown = np.ones(len(formulas.literals) - 1, bool)
    for_itself = formulas.kind <= PAIR
    owner = np.repeat(np.arange(len(is_shown)), np.diff(formulas.literals))
    is_shown[owner[~for_itself]] = False
    is_left = ~((clause == best[search]) & is_shown[clause])
    clause, search = clause[is_left], search[is_left]
    order = np.lexsort((costs.clauses[clause], search))
    return np.searchsorted(search, np.arange(len(roots) + 1)), clause[order]


def _trees(searches: CompiledSearches, search: _Array, ref: _Array) -> list[StretchTree]:
    found = []
    table = searches.stretches[ref]
    for code in np.unique(table[:, 0]).tolist():
        mine = table[:, 0] == code
        low, high = table[mine, 1], table[mine, 2]
        bounds = np.unique(np.concatenate([low, high]))
        if len(bounds) > BOUNDS_MAX:
            bounds = bounds[np.linspace(0, len(bounds) - 1, BOUNDS_MAX).astype(np.int64)]
        leaves = len(bounds) + 1
        node, number = _nodes(np.searchsorted(bounds, low, "right"), np.searchsorted(bounds, high, "right"), leaves)
        found.append(StretchTree(code, bounds, leaves, Postings.of(node, search[mine][number])))
    return found


def _nodes(first: _Array, last: _Array, leaves: int) -> tuple[_Array, _Array]:
    """The nodes that together have the leaves from first to last, and of which stretch each is."""
    left, right, number = first + leaves, last + leaves + 1, np.arange(len(first))
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    while len(number):
        is_open = left < right
        left, right, number = left[is_open], right[is_open], number[is_open]
        odd_left, odd_right = (left & 1) == 1, (right & 1) == 1
        found.append((left[odd_left], number[odd_left]))
        found.append((right[odd_right] - 1, number[odd_right]))
        left, right = (left + 1) >> 1, right >> 1
    return np.concatenate([node for node, _ in found]), np.concatenate([each for _, each in found])


def _cells(searches: CompiledSearches, search: _Array, ref: _Array) -> tuple[Postings, list[tuple[int, int]]]:
    used, which = np.unique(ref, return_inverse=True)
    shapes = Shapes.of([searches.places[number] for number in used.tolist()])
    shape, level, key = cover(shapes)
    order = np.argsort(which, kind="stable")
    ends = np.searchsorted(which[order], np.arange(len(used) + 1))
    place, number = positions(ends[shape], ends[shape + 1])
    levels = sorted(set(zip(shapes.code[shape].astype(int).tolist(), level.tolist(), strict=True)))
    return Postings.of(key[number], search[order[place]]), levels
