"""Wildcards: which words match which patterns. Each distinct word is compared once in a batch, however many documents have it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.search.query import Fuzzy, Pattern, Prefix, Wildcard, WordRange

_LAST = "\U0010ffff"
_Array = Any
"""A NumPy array."""


def pattern_hits(words: pa.StringArray, patterns: Sequence[Pattern]) -> tuple[_Array, _Array]:
    """The words that match a pattern, and the pattern, by their numbers."""
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    if len(words) and patterns:
        found += _prefixes(words, patterns)
        found += _others(words, patterns)
    return np.concatenate([word for word, _ in found]), np.concatenate([pattern for _, pattern in found])


def edits_between(words: pa.StringArray, word: str) -> _Array:
    """How many edits make a word of each of some words."""
    wanted = np.frombuffer(word.encode("utf-32-le"), np.uint32)
    rows = [np.frombuffer(each.encode("utf-32-le"), np.uint32)[None] for each in words.to_pylist()]
    return np.array([_distances(row, wanted)[0] for row in rows], np.int64)


def _prefixes(words: pa.StringArray, patterns: Sequence[Pattern]) -> Iterator[tuple[_Array, _Array]]:
    """All prefixes of one length at once: what words begin with is looked up among them."""
    by_length: dict[int, dict[str, list[int]]] = {}
    for number, pattern in enumerate(patterns):
        if isinstance(pattern, Prefix):
            by_length.setdefault(len(pattern.start), {}).setdefault(pattern.start, []).append(number)
    for length, starts in by_length.items():
        at = pc.index_in(pc.utf8_slice_codeunits(words, 0, length), value_set=pa.array(starts, pa.string()))
        hit = np.flatnonzero(np.asarray(at.is_valid()))
        counts = np.array([len(numbers) for numbers in starts.values()])
        firsts, numbers = np.cumsum(counts) - counts, np.array([each for some in starts.values() for each in some])
        which = np.asarray(at.drop_null())
        width = counts[which]
        place = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width) + np.repeat(firsts[which], width)
        yield np.repeat(hit, width), numbers[place]


def _others(words: pa.StringArray, patterns: Sequence[Pattern]) -> Iterator[tuple[_Array, _Array]]:
    others = [(number, each) for number, each in enumerate(patterns) if not isinstance(each, Prefix)]
    if not others:
        return
    order = np.asarray(pc.sort_indices(words))
    ordered = words.take(pa.array(order))
    texts: list[str] = ordered.to_pylist()
    letters = _Letters(ordered) if any(isinstance(each, Fuzzy) for _, each in others) else None
    for number, pattern in others:
        match pattern:
            case Wildcard():
                hit = _wildcard(ordered, texts, pattern)
            case WordRange():
                hit = _in_range(texts, pattern)
            case Fuzzy():
                assert letters is not None
                hit = letters.near(pattern.word, pattern.edits)
        yield order[hit], np.full(len(hit), number)


def _wildcard(words: pa.StringArray, texts: list[str], pattern: Wildcard) -> _Array:
    start = pattern.pieces[0] if isinstance(pattern.pieces[0], str) else ""
    low, high = bisect_left(texts, start), bisect_left(texts, start + _LAST)
    regex = "".join(_quoted(each) if isinstance(each, str) else "." if each else ".*" for each in pattern.pieces)
    hit = pc.match_substring_regex(words.slice(low, high - low), f"(?s)^{regex}$")
    return np.flatnonzero(np.asarray(hit)) + low


def _quoted(text: str) -> str:
    return "".join(sign if sign.isalnum() else f"\\x{{{ord(sign):x}}}" for sign in text)


def _in_range(texts: list[str], pattern: WordRange) -> _Array:
    low, high = 0, len(texts)
    if pattern.low is not None:
        low = bisect_left(texts, pattern.low + ("" if pattern.with_low else "\0"))
    if pattern.high is not None:
        high = bisect_left(texts, pattern.high + ("\0" if pattern.with_high else ""))
    return np.arange(low, high)


class _Letters:
    """Words as rows of code points, by their length."""

    def __init__(self, words: pa.StringArray) -> None:
        lengths = np.asarray(pc.utf8_length(words))
        self._rows = {length: np.flatnonzero(lengths == length) for length in np.unique(lengths).tolist()}
        self._points = {
            length: np.frombuffer(
                "".join(words.take(pa.array(rows)).to_pylist()).encode("utf-32-le"), np.uint32
            ).reshape(-1, length)
            for length, rows in self._rows.items()
            if length
        }

    def near(self, word: str, edits: int) -> _Array:
        """The words that at most so many edits make of one."""
        wanted = np.frombuffer(word.encode("utf-32-le"), np.uint32)
        found = [self._rows[0]] if len(word) <= edits and 0 in self._rows else [np.zeros(0, np.int64)]
        for length in range(max(1, len(word) - edits), len(word) + edits + 1):
            if length in self._points:
                found.append(self._rows[length][_distances(self._points[length], wanted) <= edits])
        return np.sort(np.concatenate(found))


def _distances(rows: _Array, wanted: _Array) -> _Array:
    """The edits between each row and a word: insertions, deletions, replacements and swaps of neighbours."""
    before_last, last = None, np.tile(np.arange(len(wanted) + 1, dtype=np.int16), (len(rows), 1))
    for at in range(rows.shape[1]):
        row = np.empty_like(last)
        row[:, 0] = at + 1
        differs = rows[:, at, None] != wanted
        for to in range(1, len(wanted) + 1):
            row[:, to] = np.minimum(np.minimum(row[:, to - 1], last[:, to]) + 1, last[:, to - 1] + differs[:, to - 1])
            if before_last is not None and to > 1:
                is_swap = (rows[:, at] == wanted[to - 2]) & (rows[:, at - 1] == wanted[to - 1])
                row[:, to] = np.where(is_swap, np.minimum(row[:, to], before_last[:, to - 2] + 1), row[:, to])
        before_last, last = last, row
    return last[:, -1]
