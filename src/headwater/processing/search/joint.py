"""A joint of parts: compiled searches of several parts as one, without the searches that are left out, and without reading any text again.

Words, pairs and other conditions that parts have in common become one. What only left-out searches ask for goes with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headwater.processing.search.compiler import (
    FORMULA,
    PAIR,
    PATTERN,
    PHRASE,
    PLACE,
    STRETCH,
    WHERE,
    WORD,
    ClauseTree,
    CompiledPhrase,
    CompiledSearches,
)
from headwater.processing.state.sorted_runs import positions

_Array = Any
"""A NumPy array."""


def joined(parts: Sequence[CompiledSearches], kept: Sequence[_Array]) -> CompiledSearches:
    """One part of several: of each the searches with these numbers, one part after the other."""
    parts = [_pruned(part, searches) for part, searches in zip(parts, kept, strict=True)]
    terms = _once([part.terms for part in parts])
    count = len(terms.things)
    words = _rows_once(
        [_with_terms(part.words, [1], term) for part, term in zip(parts, terms.numbers, strict=True)], count
    )
    pairs = _rows_once(
        [_with_terms(part.pairs, [1, 2], term) for part, term in zip(parts, terms.numbers, strict=True)], count
    )
    phrases = _once(
        [[_moved(each, term) for each in part.phrases] for part, term in zip(parts, terms.numbers, strict=True)]
    )
    patterns, places = _once([part.patterns for part in parts]), _once([part.places for part in parts])
    wheres = _once([part.wheres for part in parts])
    shifts = np.cumsum([0, *(len(part.stretches) for part in parts)])
    stretches = [np.arange(len(part.stretches)) + shift for part, shift in zip(parts, shifts[:-1], strict=True)]
    numbers = {
        WORD: words.numbers, PAIR: pairs.numbers, PHRASE: phrases.numbers, PATTERN: patterns.numbers,
        PLACE: places.numbers, WHERE: wheres.numbers, STRETCH: stretches,
    }  # fmt: skip
    roots, formulas = _chained(parts, numbers)
    return CompiledSearches(
        roots, formulas, terms.things, words.things, patterns.things, pairs.things, phrases.things,
        np.concatenate([part.stretches for part in parts]), places.things, wheres.things,
    )  # fmt: skip


def _pruned(part: CompiledSearches, searches: _Array) -> CompiledSearches:
    """Some searches of a part, with what they ask for."""
    roots, formulas = _reached(part.formulas, part.roots[searches])
    ref, used = formulas.ref.copy(), {}
    for kind in (WORD, PATTERN, PAIR, PHRASE, STRETCH, PLACE, WHERE):
        mine = formulas.kind == kind
        used[kind], ref[mine] = np.unique(formulas.ref[mine], return_inverse=True)
    words, pairs = part.words[used[WORD]], part.pairs[used[PAIR]]
    phrases = [part.phrases[number] for number in used[PHRASE].tolist()]
    in_phrases = [term for phrase in phrases for term in phrase.terms]
    terms = np.unique(np.concatenate([words[:, 1], pairs[:, 1], pairs[:, 2], np.array(in_phrases, np.int64)]))
    number = np.full(len(part.terms), -1)
    number[terms] = np.arange(len(terms))
    return CompiledSearches(
        roots, formulas._replace(ref=ref), [part.terms[term] for term in terms.tolist()], _with_terms(words, [1], number),
        [part.patterns[each] for each in used[PATTERN].tolist()], _with_terms(pairs, [1, 2], number),
        [_moved(phrase, number) for phrase in phrases], part.stretches[used[STRETCH]],
        [part.places[each] for each in used[PLACE].tolist()], [part.wheres[each] for each in used[WHERE].tolist()],
    )  # fmt: skip


def _reached(formulas: ClauseTree, roots: _Array) -> tuple[_Array, ClauseTree]:
    """The formulas that are roots or lie in one, and the new numbers of the roots."""
    is_used, reached = np.zeros(len(formulas.clauses) - 1, bool), roots
    while len(reached):
        is_used[reached] = True
        inner = formulas.ref[_literals(formulas, reached)]
        inner = inner[formulas.kind[_literals(formulas, reached)] == FORMULA]
        reached = np.unique(inner[~is_used[inner]])
    used, number = np.flatnonzero(is_used), np.cumsum(is_used) - 1
    clause, _ = positions(formulas.clauses[used], formulas.clauses[used + 1])
    literal = _literals(formulas, used)
    kind, ref = formulas.kind[literal], formulas.ref[literal].copy()
    ref[kind == FORMULA] = number[ref[kind == FORMULA]]
    return number[roots], ClauseTree(
        _starts(np.diff(formulas.clauses)[used]), _starts(np.diff(formulas.literals)[clause]), kind, ref,
        formulas.negated[literal],
    )  # fmt: skip


def _literals(formulas: ClauseTree, numbers: _Array) -> _Array:
    """The literals of formulas, one after the other."""
    clause, _ = positions(formulas.clauses[numbers], formulas.clauses[numbers + 1])
    literal, _ = positions(formulas.literals[clause], formulas.literals[clause + 1])
    return literal


def _chained(parts: Sequence[CompiledSearches], numbers: dict[int, list[_Array]]) -> tuple[_Array, ClauseTree]:
    """The formulas of parts one after the other, with the new numbers of what their literals refer to."""
    roots, refs, first = [], [], 0
    for at, part in enumerate(parts):
        kind, ref = part.formulas.kind, part.formulas.ref.copy()
        for each, found in numbers.items():
            ref[kind == each] = found[at][ref[kind == each]]
        ref[kind == FORMULA] += first
        roots.append(part.roots + first)
        refs.append(ref)
        first += len(part.formulas.clauses) - 1
    every = [part.formulas for part in parts]
    return np.concatenate(roots), ClauseTree(
        _starts(np.concatenate([np.diff(each.clauses) for each in every])),
        _starts(np.concatenate([np.diff(each.literals) for each in every])),
        np.concatenate([each.kind for each in every]), np.concatenate(refs), np.concatenate([each.negated for each in every]),
    )  # fmt: skip


class _Merged(NamedTuple):
    """Things of parts, each once, and for each part the new numbers of its things."""

    things: Any
    numbers: list[_Array]


def _once(parts: Sequence[Sequence[Any]]) -> _Merged:
    known: dict[Any, int] = {}
    numbers = [np.array([known.setdefault(thing, len(known)) for thing in part], np.int64) for part in parts]
    return _Merged(list(known), numbers)


def _rows_once(parts: Sequence[_Array], terms: int) -> _Merged:
    """Rows of a scope and one or two terms."""
    rows = np.concatenate(parts)
    key = rows[:, 0].copy()
    for at in range(1, rows.shape[1]):
        key = key * terms + rows[:, at]
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return _Merged(rows[first], np.split(number, np.cumsum([len(part) for part in parts]))[:-1])


def _with_terms(rows: _Array, columns: list[int], number: _Array) -> _Array:
    """Rows with the new numbers of their terms."""
    rows = rows.copy()
    for at in columns:
        rows[:, at] = number[rows[:, at]]
    return rows


def _moved(phrase: CompiledPhrase, number: _Array) -> CompiledPhrase:
    return phrase._replace(terms=tuple(int(number[term]) for term in phrase.terms))


def _starts(counts: _Array) -> _Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
