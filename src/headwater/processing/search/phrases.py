"""Phrases in documents: whether words lie near each other, for many pairs of a document and a phrase at once.

A phrase matches where there is a place for each of its words, no two the same, so that the places, each less the word's place in the
phrase, differ by `slop` at most. This is Lucene's rule: swapped neighbours are displaced by 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headwater.processing.search.compiler import CompiledPhrase
from headwater.processing.state.sorted_runs import positions

_Array = Any
"""A NumPy array."""


class WordPlaces:
    """The places of words in one field of some documents, as one ordered array of document, term and place."""

    def __init__(self, row: _Array, term: _Array, place: _Array, terms: int) -> None:
        self._terms, self._width = terms, int(place.max(initial=0)) + 1
        self._keys = np.sort(self._base(row, term) + place)

    def _base(self, row: _Array, term: _Array | int) -> _Array:
        return (row * self._terms + term) * self._width

    def near(self, row: _Array, phrase: CompiledPhrase) -> _Array:
        """Which documents have a phrase."""
        if phrase.slop and len(set(phrase.terms)) < len(phrase.terms):
            return np.array([self._is_near(each, phrase) for each in row.tolist()], bool)
        starts = range(len(phrase.terms)) if phrase.slop else [0]
        found = np.zeros(len(row), bool)
        for first in starts:
            found |= self._from(row, phrase, first)
        return found

    def _from(self, row: _Array, phrase: CompiledPhrase, first: int) -> _Array:
        """Whether the words lie near where this one is the one that is displaced least to the right."""
        base = self._base(row, phrase.terms[first])
        low, high = np.searchsorted(self._keys, base), np.searchsorted(self._keys, base + self._width)
        at, number = positions(low, high)
        origin = self._keys[at] - base[number] - phrase.places[first]
        for term, place in zip(phrase.terms, phrase.places, strict=True):
            base = self._base(row[number], term)
            wanted = base + np.maximum(origin + place, 0)
            next_ = self._keys[np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)]
            is_near = (next_ >= wanted) & (next_ < base + self._width) & (next_ - base - place - origin <= phrase.slop)
            number, origin = number[is_near], origin[is_near]
        return np.bincount(number, minlength=len(row)) > 0

    def _is_near(self, row: int, phrase: CompiledPhrase) -> bool:
        """One document, one word after the other: words that are twice in a phrase need two places, which is rarely asked for."""
        places = {term: self._places(row, term) for term in phrase.terms}
        origins = {at - place for term, place in zip(phrase.terms, phrase.places, strict=True) for at in places[term]}
        return any(_fits(places, phrase, origin) for origin in sorted(origins))

    def _places(self, row: int, term: int) -> list[int]:
        base = (row * self._terms + term) * self._width
        low, high = np.searchsorted(self._keys, [base, base + self._width])
        found: list[int] = (self._keys[low:high] - base).tolist()
        return found


def _fits(places: dict[int, list[int]], phrase: CompiledPhrase, origin: int) -> bool:
    """Whether each word has a place of its own from its place behind the origin up to the slop; the first free one is the best."""
    taken = set[tuple[int, int]]()
    for place, term in sorted(zip(phrase.places, phrase.terms, strict=True)):
        reach = range(origin + place, origin + place + phrase.slop + 1)
        at = next((at for at in places[term] if at in reach and (term, at) not in taken), None)
        if at is None:
            return False
        taken.add((term, at))
    return True


def phrase_terms(phrases: Sequence[CompiledPhrase], terms: int) -> _Array:
    """Which terms are in a phrase."""
    found = np.zeros(terms, bool)
    found[[term for phrase in phrases for term in phrase.terms]] = True
    return found
