"""The machine: it finds the matches of a pattern with conditions that depend on the match, by trying targets in the order of preference.

All keys go in step: in each step every search tries one target. Conditions of a variable are computed for all searches that try it. A
search whose target fails tries the next one, and after the last it goes back by a row. One search at a time goes through a segment, so
the trace needs one line for each row.

A search from one start takes at most `STEPS` steps for each of the `rows_max` rows; then the start is given up and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from headwater.processing.patterns.automaton import ABSENT, Automaton
from headwater.processing.patterns.matcher import Tables, segments_of
from headwater.processing.patterns.outcome import NEVER, Matches, Rule, SearchOutcome, SearchRows
from headwater.processing.patterns.trace import MatchCondition, Trace

Array = Any
"""A NumPy array."""

STEPS = 10


class _Tries(NamedTuple):
    """Searches that are under way, one for each segment."""

    number: Array
    end: Array
    """The end of the segment."""
    start: Array
    row: Array
    source: Array
    """The list of the next target, and which of it is next."""
    place: Array
    reach: Array
    steps: Array

    def only(self, which: Array) -> _Tries:
        """Some of them."""
        return _Tries(*(each[which] for each in self))


def find_by_trying(
    automaton: Automaton, rule: Rule, rows: SearchRows, trace: Trace, conditions: Mapping[int, MatchCondition]
) -> Matches:
    """The matches; `conditions` are those that depend on the match, by the numbers of their variables."""
    return _Machine(automaton, rule, rows, trace, conditions).matches()


class _Machine:
    """One search over some rows."""

    def __init__(
        self, automaton: Automaton, rule: Rule, rows: SearchRows, trace: Trace, conditions: Mapping[int, MatchCondition]
    ) -> None:
        tables = Tables.of(automaton, rule.skip_to)
        self._tables, self._rule, self._rows, self._trace, self._conditions = tables, rule, rows, trace, conditions
        self._outcome = SearchOutcome(rule, rows)
        count = len(rows.times)
        self._is_absent = np.array([automaton.variables[each].startswith(ABSENT) for each in automaton.position], bool)
        self._source, self._place = np.zeros((2, count), np.int64)

    def matches(self) -> Matches:
        """Everything."""
        first, end = segments_of(self._tables, self._rows, self._outcome)
        tries = self._begun(first, end)
        while len(tries.start):
            tries = self._step(tries)
        return self._outcome.matches()

    def _begun(self, start: Array, end: Array) -> _Tries:
        """Searches from starts that are before the ends of their segments."""
        is_there = start < end
        start, end = start[is_there], end[is_there]
        rows, key = self._rows, self._outcome.key[start]
        source = self._tables.positions + (rows.is_begin[key] & (start == rows.start[key])).astype(np.int64)
        none = np.zeros(len(start), np.int64)
        return _Tries(self._outcome.numbers(len(start)), end, start, start, source, none, start + 1, none)

    def _step(self, tries: _Tries) -> _Tries:
        """Each search tries its next target."""
        self._outcome.note_looks(len(tries.start))
        count, lists = self._tables.positions, self._tables.lists
        known, horizon = self._outcome.known[self._outcome.key[tries.start]], self._outcome.horizon[tries.start]
        target = np.where(
            tries.place < lists.shape[1], lists[tries.source, np.minimum(tries.place, lists.shape[1] - 1)], count + 3
        )
        is_row, is_last = target < count, tries.row >= known
        is_over = (target == count + 2) & (tries.row == horizon) & ~self._outcome.is_by_rows[tries.start]
        is_over &= self._outcome.is_closed[tries.start]
        is_done = (target == count) | ((target == count + 1) & is_last & self._rows.is_over) | is_over
        waits = is_last & (is_row | (target == count + 1)) & ~self._outcome.is_closed[tries.start]
        is_open = waits & ~is_done
        is_inside = is_row & ~is_last & (tries.row < horizon)
        takes = np.zeros(len(target), bool)
        takes[is_inside] = self._takes(tries.only(is_inside), target[is_inside])
        looked = np.where(is_row | (target == count + 1), np.where(is_last, NEVER, tries.row + 1), -1)
        looked = np.where(is_over | (is_done & (target == count + 1)), NEVER, np.where(is_done | takes, -1, looked))
        tries = tries._replace(reach=np.maximum(tries.reach, looked))
        goes_back = target == count + 3
        is_tired = tries.steps > STEPS * self._rule.rows_max
        fails = ((goes_back & (tries.row == tries.start)) | is_tired) & ~is_done & ~is_open
        following = self._finished(tries, is_done, is_open, fails, is_tired)
        before = np.maximum(tries.row - 1, 0)
        taken, left = tries.row[takes], goes_back & ~fails
        self._source[taken], self._place[taken] = tries.source[takes], tries.place[takes]
        moved = tries._replace(
            source=np.where(takes, target, np.where(left, self._source[before], tries.source)),
            place=np.where(takes, 0, np.where(left, self._place[before] + 1, tries.place + 1)),
            row=tries.row + takes - left, steps=tries.steps + 1,
        ).only(~is_done & ~is_open & ~fails)  # fmt: skip
        return _Tries(*(np.concatenate(pair) for pair in zip(moved, following, strict=True)))

    def _takes(self, tries: _Tries, target: Array) -> Array:
        """Which searches may take their rows as their targets."""
        variable = self._tables.variable[target]
        found = self._rows.holds[tries.row, variable].copy()
        row, start = tries.row[found], tries.start[found]
        self._trace.take(row, start, target[found])
        for number, condition in self._conditions.items():
            mine = np.flatnonzero(found & (variable == number))
            if len(mine):
                found[mine] = condition.holds(self._trace, tries.row[mine], tries.start[mine])
        return found

    def _finished(self, tries: _Tries, is_done: Array, is_open: Array, fails: Array, is_tired: Array) -> _Tries:
        """Notes what has come of searches, and begins those that follow."""
        failing, done = tries.only(fails), tries.only(is_done)
        self._outcome.note_failing(failing.start, failing.reach, is_given_up=is_tired[fails])
        self._outcome.note_failed(failing.start, failing.start + 1)
        self._outcome.note_open(tries.start[is_open])
        lengths = done.row - done.start
        rows = np.arange(int(lengths.sum())) + np.repeat(done.start - np.cumsum(lengths) + lengths, lengths)
        self._outcome.note_steps(np.repeat(done.number, lengths), rows, self._trace.position[rows])
        self._outcome.note_matches(done.number, done.start, done.row, done.reach)
        start, end = [failing.start + 1, self._after(done)], [failing.end, done.end]
        if self._rule.skip == "next" and not self._rule.is_ordered:
            start.append(tries.start[is_open] + 1)
            end.append(tries.end[is_open])
        return self._begun(np.concatenate(start), np.concatenate(end))

    def _after(self, done: _Tries) -> Array:
        """Where the search goes on after matches."""
        skip, after = self._rule.skip, done.start + 1
        if skip == "past" and not self._is_absent.any():
            return np.maximum(done.row, after)
        if skip == "next":
            return after
        is_named = ~self._is_absent if skip == "past" else self._tables.is_skip
        for at, (start, end) in enumerate(zip(done.start.tolist(), done.row.tolist(), strict=True)):
            named = start + np.flatnonzero(is_named[self._trace.position[start:end]])
            if len(named):
                after[at] = max(start + 1, int(named[0 if skip == "first" else -1]) + (skip == "past"))
        return after
