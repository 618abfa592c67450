"""The matcher: which searches match which documents, for many of both at once.

Documents are worked on in blocks. Words of a block become the presences that searches ask for (words, patterns, pairs); presences that are
anchors, values and coordinates give candidates, each a document with a search; and what is left of a candidate's clauses is checked
clause by clause, each time for all candidates that are still there. There is no loop over documents, searches or candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.search.anchors import Anchors, Seen, anchors_of, presence_offsets
from headwater.processing.search.cells import Shapes, cells_of
from headwater.processing.search.compiler import FORMULA, PAIR, PHRASE, PLACE, STRETCH, WHERE, CompiledSearches
from headwater.processing.search.documents import Documents, FieldWords
from headwater.processing.search.phrases import WordPlaces, phrase_terms
from headwater.processing.search.wildcards import pattern_hits
from headwater.processing.state.sorted_runs import positions

TABLE_BYTES_MAX = 64 << 20
"""So large is the table of what the documents of a block have."""

BLOCK_ROWS_MAX = 4_096
CANDIDATES_MAX = 1 << 21
SAMPLE_ROWS = 2_048
_Array = Any
"""A NumPy array."""


class FoundPairs(NamedTuple):
    """Pairs of a document and a search, by their numbers."""

    row: _Array
    search: _Array


class Matcher:
    """Matches one part of the searches."""

    def __init__(self, searches: CompiledSearches) -> None:
        self.searches = searches
        self.seen = Seen(np.zeros(searches.presences, np.int64), np.zeros(len(searches.stretches), np.int64), 0)
        self._anchors: Anchors | None = None
        self._anchored_at = 0

    @property
    def always(self) -> int:
        """How many searches are checked with every document."""
        return 0 if self._anchors is None else len(self._anchors.always)

    def matches(self, documents: Documents, since: _Array, until: _Array, times: _Array) -> FoundPairs:
        """The pairs that match; of a search only documents with `since` <= time < `until`."""
        if not len(self.searches) or not len(documents):
            return FoundPairs(np.zeros(0, np.int64), np.zeros(0, np.int64))
        lookup = _Lookup(self.searches, self._tables, documents)
        self._anchor(lookup)
        assert self._anchors is not None
        found, count = [np.zeros(0, np.int64)], len(self.searches)
        for start, end in lookup.blocks():
            block, pairs = _Block(lookup, start, end), [np.zeros(0, np.int64)]
            for row, search in self._candidates(block):
                is_due = (since[search] <= times[row]) & (times[row] < until[search])
                row, search = row[is_due], search[is_due]
                holds = block.holds(
                    row, self._anchors.checks[search], self._anchors.checks[search + 1], self._anchors.check_clauses
                )
                pairs.append(row[holds] * count + search[holds])
            block.clear()
            found.append(_distinct(np.concatenate(pairs)))
        every = np.concatenate(found)
        return FoundPairs(every // count, every % count)

    @cached_property
    def _tables(self) -> _Tables:
        return _Tables(self.searches)

    def _anchor(self, lookup: _Lookup) -> None:
        """Chooses anchors by the documents that were seen, and again when these are many more."""
        if self.seen.documents < SAMPLE_ROWS:
            self.seen = lookup.sample(self.seen)
        if self._anchors is None or self.seen.documents >= 4 * self._anchored_at:
            self._anchors, self._anchored_at = anchors_of(self.searches, self.seen), self.seen.documents

    def _candidates(self, block: _Block) -> Iterator[tuple[_Array, _Array]]:
        anchors = self._anchors
        assert anchors is not None
        row, presence = block.row, block.presence
        hit, place = anchors.by_presence.find(presence)
        width = self.searches.presences
        once = _distinct(row[hit] * width + presence[hit])
        hit, place = anchors.by_presence.find(once % width)
        yield from _expanded(
            once[hit] // width + block.start, anchors.by_presence.starts, place, anchors.by_presence.searches
        )
        rows = np.arange(block.start, block.end)
        for tree in anchors.trees:
            values = block.lookup.documents.numbers(tree.code)[rows]
            node, is_there = np.searchsorted(tree.bounds, values, "right") + tree.leaves, values > -(2**63)
            while bool((node[is_there] > 0).any()):
                hit, place = tree.postings.find(np.where(is_there, node, -1))
                yield from _expanded(rows[hit], tree.postings.starts, place, tree.postings.searches)
                node = node >> 1
        for code, level in anchors.cell_levels:
            latitude, longitude = (degrees[rows] for degrees in block.lookup.documents.place(code))
            there = np.flatnonzero(np.isfinite(latitude))
            hit, place = anchors.by_cell.find(cells_of(code, level, latitude[there], longitude[there]))
            yield from _expanded(rows[there[hit]], anchors.by_cell.starts, place, anchors.by_cell.searches)
        if len(anchors.always):
            starts = np.array([0, len(anchors.always)])
            yield from _expanded(rows, starts, np.zeros(len(rows), np.int64), anchors.always)


def _distinct(numbers: _Array) -> _Array:
    """Numbers in order, each once; sorting is quicker than NumPy's hashing."""
    numbers = np.sort(numbers)
    is_new = np.ones(len(numbers), bool)
    np.not_equal(numbers[1:], numbers[:-1], out=is_new[1:])
    return numbers[is_new]


def _expanded(row: _Array, starts: _Array, place: _Array, searches: _Array) -> Iterator[tuple[_Array, _Array]]:
    """The searches of postings for each row that found some, in pieces that memory holds."""
    count = starts[place + 1] - starts[place]
    total = np.cumsum(count)
    begin = 0
    while begin < len(row):
        end = max(begin + 1, int(np.searchsorted(total, (total[begin - 1] if begin else 0) + CANDIDATES_MAX, "right")))
        at, number = positions(starts[place[begin:end]], starts[place[begin:end] + 1])
        yield row[begin:end][number], searches[at]
        begin = end


class _Tables:
    """What of searches is the same for all documents."""

    def __init__(self, searches: CompiledSearches) -> None:
        formulas = searches.formulas
        self.terms = pa.array(searches.terms, pa.string())
        self.offsets = presence_offsets(searches)
        is_presence = formulas.kind <= PAIR
        self.presence = np.where(is_presence, formulas.ref + self.offsets[np.where(is_presence, formulas.kind, 0)], -1)
        self.is_single = np.diff(formulas.literals) == 1
        self.shapes = Shapes.of(searches.places)
        self.scopes = np.unique(np.concatenate([searches.words[:, 0], searches.pairs[:, 0]])).tolist()
        self.words = {scope: self._words(searches, scope) for scope in self.scopes}
        self.pairs = {scope: self._pairs(searches, scope) for scope in self.scopes}
        self.pattern_scopes = np.array([scope for scope, _ in searches.patterns], np.int64)
        self.in_phrases = phrase_terms(searches.phrases, len(searches.terms))

    def _words(self, searches: CompiledSearches, scope: int) -> _Array:
        """The presence of each term in a scope, -1 where nobody asks for it."""
        found = np.full(len(searches.terms), -1)
        mine = np.flatnonzero(searches.words[:, 0] == scope)
        found[searches.words[mine, 1]] = mine
        return found

    def _pairs(self, searches: CompiledSearches, scope: int) -> tuple[_Array, _Array, _Array, _Array]:
        """The pairs of a scope as keys in order, their presences, and which terms are first and second in one."""
        mine = np.flatnonzero(searches.pairs[:, 0] == scope)
        first, second = searches.pairs[mine, 1], searches.pairs[mine, 2]
        keys = first * len(searches.terms) + second
        order = np.argsort(keys)
        is_first, is_second = np.zeros((2, len(searches.terms)), bool)
        is_first[first], is_second[second] = True, True
        return keys[order], mine[order] + self.offsets[PAIR], is_first, is_second


class _Lookup:
    """The words of a batch of documents, as numbers that one part of the searches knows."""

    def __init__(self, searches: CompiledSearches, tables: _Tables, documents: Documents) -> None:
        self.searches, self.tables, self.documents = searches, tables, documents
        self.term = np.asarray(pc.fill_null(pc.index_in(documents.terms, value_set=tables.terms), -1)).astype(np.int64)
        word, pattern = pattern_hits(documents.written, [pattern for _, pattern in searches.patterns])
        order = np.argsort(word, kind="stable")
        self._rows = max(16, min(BLOCK_ROWS_MAX, len(documents), TABLE_BYTES_MAX // max(1, searches.presences)))
        self.table = np.zeros(self._rows * searches.presences + 1, bool)
        self.hits = pattern[order]
        self.hit_starts = np.searchsorted(word[order], np.arange(len(documents.written) + 1))

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The documents, from and to."""
        for start in range(0, len(self.documents), self._rows):
            yield start, min(start + self._rows, len(self.documents))

    def sample(self, seen: Seen) -> Seen:
        """What was seen before, and in some of these documents."""
        count = min(SAMPLE_ROWS, len(self.documents))
        row, presence = self.presences(0, count)
        once = _distinct(row * self.searches.presences + presence) % max(1, self.searches.presences)
        stretches, table = seen.stretches.copy(), self.searches.stretches
        for code in np.unique(table[:, 0]).tolist():
            values, mine = np.sort(self.documents.numbers(code)[:count]), table[:, 0] == code
            inside = np.searchsorted(values, table[mine, 2], "right") - np.searchsorted(values, table[mine, 1])
            stretches[mine] += np.maximum(inside, 0)
        presences = seen.presences + np.bincount(once, minlength=self.searches.presences)
        return Seen(presences, stretches, seen.documents + count)

    def fields(self, start: int, end: int) -> Iterator[tuple[FieldWords, _Array]]:
        """The words of some documents, field by field, and the term of each."""
        for words in self.documents.words:
            low, high = np.searchsorted(words.row, [start, end])
            part = words._replace(
                row=words.row[low:high] - start, place=words.place[low:high], number=words.number[low:high]
            )
            yield part, self.term[part.number]

    def presences(self, start: int, end: int) -> tuple[_Array, _Array]:
        """What some documents have: the number of the document from the first one on, and the presence."""
        found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        for words, term in self.fields(start, end):
            known = np.flatnonzero(term >= 0)
            for scope in self.tables.scopes:
                if scope == words.code + 1 or (scope == 0 and words.is_text):
                    presence = self.tables.words[scope][term[known]]
                    is_asked = presence >= 0
                    found.append((words.row[known[is_asked]], presence[is_asked]))
                    found.append(self._pairs(words, term, scope))
            found.append(self._patterns(words))
        return np.concatenate([row for row, _ in found]), np.concatenate([presence for _, presence in found])

    def _pairs(self, words: FieldWords, term: _Array, scope: int) -> tuple[_Array, _Array]:
        keys, presences, is_first, is_second = self.tables.pairs[scope]
        if not len(keys) or len(term) < 2:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        first, second = term[:-1], term[1:]
        at = np.flatnonzero(is_first[first] & is_second[second] & (first >= 0) & (second >= 0))
        at = at[(words.row[at] == words.row[at + 1]) & (words.place[at] + 1 == words.place[at + 1])]
        wanted = term[at] * len(self.searches.terms) + term[at + 1]
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        is_there = keys[place] == wanted
        return words.row[at[is_there]], presences[place[is_there]]

    def _patterns(self, words: FieldWords) -> tuple[_Array, _Array]:
        at, number = positions(self.hit_starts[words.number], self.hit_starts[words.number + 1])
        pattern = self.hits[at]
        scope = self.tables.pattern_scopes[pattern]
        is_mine = (scope == words.code + 1) | ((scope == 0) & words.is_text)
        return words.row[number[is_mine]], pattern[is_mine] + self.tables.offsets[1]


class _Block:
    """Some documents, and what they have of what searches ask for."""

    def __init__(self, lookup: _Lookup, start: int, end: int) -> None:
        self.lookup, self.start, self.end = lookup, start, end
        self._tables, self._formulas = lookup.tables, lookup.searches.formulas
        self._width = lookup.searches.presences
        self.row, self.presence = lookup.presences(start, end)
        self._had = self.row * self._width + self.presence
        self._has = lookup.table
        self._has[self._had] = True

    def clear(self) -> None:
        """Leaves the table to the next block."""
        self._has[self._had] = False

    def holds(self, row: _Array, first: _Array, last: _Array, clauses: _Array) -> _Array:
        """For each document whether all of some clauses hold: those from its first to its last."""
        found = np.ones(len(row), bool)
        left = np.flatnonzero(first < last)
        at = first[left]
        while len(left):
            holds = self._clause(row[left], clauses[at])
            found[left[~holds]] = False
            left, at = left[holds], at[holds] + 1
            is_more = at < last[left]
            left, at = left[is_more], at[is_more]
        return found

    def _clause(self, row: _Array, clause: _Array) -> _Array:
        starts = self._formulas.literals
        is_single = self._tables.is_single[clause]
        if bool(is_single.all()):
            return self._literal(row, starts[clause])
        found = np.zeros(len(row), bool)
        found[is_single] = self._literal(row[is_single], starts[clause[is_single]])
        several = np.flatnonzero(~is_single)
        literal, number = positions(starts[clause[several]], starts[clause[several] + 1])
        holds = self._literal(row[several[number]], literal)
        found[several[number[holds]]] = True
        return found

    def _literal(self, row: _Array, literal: _Array) -> _Array:
        negated, presence = self._formulas.negated[literal], self._tables.presence[literal]
        is_presence = presence >= 0
        if bool(is_presence.all()):
            return self._has[(row - self.start) * self._width + presence] != negated
        found = np.ones(len(row), bool)
        found[is_presence] = self._has[(row[is_presence] - self.start) * self._width + presence[is_presence]]
        kind = np.where(is_presence, -1, self._formulas.kind[literal])
        tests = {
            PHRASE: self._phrase,
            STRETCH: self._stretch,
            PLACE: self._place,
            WHERE: self._where,
            FORMULA: self._formula,
        }
        for each, test in tests.items():
            mine = np.flatnonzero(kind == each)
            if len(mine):
                found[mine] = test(row[mine], self._formulas.ref[literal[mine]])
        return found != negated

    def _formula(self, row: _Array, formula: _Array) -> _Array:
        first, last = self._formulas.clauses[formula], self._formulas.clauses[formula + 1]
        return self.holds(row, first, last, np.arange(len(self._formulas.literals) - 1))

    def _stretch(self, row: _Array, ref: _Array) -> _Array:
        table, found = self.lookup.searches.stretches[ref], np.zeros(len(row), bool)
        for code in np.unique(table[:, 0]).tolist():
            mine = table[:, 0] == code
            values = self.lookup.documents.numbers(code)[row[mine]]
            found[mine] = (values >= table[mine, 1]) & (values <= table[mine, 2])
        return found

    def _place(self, row: _Array, ref: _Array) -> _Array:
        found, codes = np.zeros(len(row), bool), self._tables.shapes.code[ref]
        for code in np.unique(codes).astype(int).tolist():
            mine = codes == code
            latitude, longitude = self.lookup.documents.place(code)
            found[mine] = self._tables.shapes.hold(ref[mine], latitude[row[mine]], longitude[row[mine]])
        return found

    def _where(self, row: _Array, ref: _Array) -> _Array:
        found = np.zeros(len(row), bool)
        for each in np.unique(ref).tolist():
            mine = ref == each
            found[mine] = self.lookup.documents.holds(self.lookup.searches.wheres[each])[row[mine]]
        return found

    def _phrase(self, row: _Array, ref: _Array) -> _Array:
        """One phrase after the other, each for all of its candidates: there are few, because their words are all there."""
        found = np.zeros(len(row), bool)
        order = np.argsort(ref, kind="stable")
        numbers, starts = np.unique(ref[order], return_index=True)
        for number, mine in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            phrase = self.lookup.searches.phrases[number]
            for code, places in self._places.items():
                if phrase.scope == code + 1 or (phrase.scope == 0 and self._is_text[code]):
                    found[mine] |= places.near(row[mine] - self.start, phrase)
        return found

    @cached_property
    def _is_text(self) -> dict[int, bool]:
        return {words.code: words.is_text for words in self.lookup.documents.words}

    @cached_property
    def _places(self) -> dict[int, WordPlaces]:
        """The places of the words that are in phrases, for each field."""
        found = {}
        for words, term in self.lookup.fields(self.start, self.end):
            mine = np.flatnonzero(term >= 0)
            mine = mine[self._tables.in_phrases[term[mine]]]
            found[words.code] = WordPlaces(
                words.row[mine], term[mine], words.place[mine], len(self.lookup.searches.terms)
            )
        return found
