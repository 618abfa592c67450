"""The operator of rules behind `hw.detect`: the rows of each key are kept once, and each rule that holds searches them.

A rule sees the rows for which its version holds, and no others: PREV finds nothing before them. When the version ends, an open match that
is complete without further rows is given, except where ABSENT at the end of the pattern still waits. So results depend on event time alone.

Conditions that are equal in several rules are computed once per batch, and so are equal values.

State, beside that of `rule_versions`:
- `waiting`: rows that the watermark has not passed.
- `open`: for each key the rows from the first that a rule still needs, as lists; and for each version with something open the place of the
  row at which its search goes on.
- `timers`: when WITHIN ends for the first open match of a key.
- `given_up`: the keys of which starts were given up, with how many and when the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.errors import InvalidInput
from headwater.processing.operators.operator import MAX_TIME, Time
from headwater.processing.operators.row_order import in_fixed_order, times_of
from headwater.processing.patterns.automaton import ABSENT
from headwater.processing.patterns.conditions import RowCondition
from headwater.processing.patterns.machine import find_by_trying
from headwater.processing.patterns.matcher import find_matches
from headwater.processing.patterns.measures import MeasurePoints
from headwater.processing.patterns.operator import (
    GIVEN_UP,
    GIVEN_UP_SPEC,
    MATCHED_AT,
    DetectPlan,
    flattened,
    note_given_up,
)
from headwater.processing.patterns.outcome import Matches, SearchRows, last_within
from headwater.processing.patterns.rule_plan import RuleForm
from headwater.processing.patterns.rule_versions import RULE, RuleSource, RuleVersion, RuleVersions
from headwater.processing.patterns.trace import Trace
from headwater.processing.state.sorted_runs import AT, H1, H2, MIN_TIME, Keys, column
from headwater.processing.state.state import State, TableSpec

_WAITING, _OPEN, _TIMERS = "waiting", "open", "timers"
_TIMER, _VERSION, _START = "timer", "version", "start"

Array = Any
"""A NumPy array."""


class DetectRules:
    """The operator. Its inputs are the events and the changes of rules."""

    name = "detect"
    keeps = MATCHED_AT

    def __init__(self, form: RuleForm, source: RuleSource, *, in_log_order: bool = True) -> None:
        self._form, self._source, self._in_log_order = form, source, in_log_order
        self.settings = (form.key, form.at, source.at, source.is_rule_first, form.rows_max, repr(form.measures))
        self.at = form.at
        shown = [form.events.field(name) for name in form.key]
        fields = [pa.field(RULE, pa.string()), *source.own, *shown, *form.measures]
        fields.append(pa.field(MATCHED_AT, pa.timestamp("us", tz="UTC")))
        names = [field.name.lower() for field in fields]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidInput(
                f"The result would have two columns {twice!r}: it has those of the rules, the key and the measures.",
                advice="Rename one of them.",
            )
        self.schema = pa.schema([field.with_nullable(True) for field in fields])
        own = [pa.field(f"r{number}", field.type) for number, field in enumerate(form.events)]
        lists = [pa.field(AT, pa.int64()), *own]
        lists = [pa.field(f"l{number}", pa.list_(field.type)) for number, field in enumerate(lists)]
        places = [pa.field(name, pa.list_(pa.int64())) for name in (_VERSION, _START)]
        self.tables = {
            _WAITING: TableSpec("timed", own),
            _OPEN: TableSpec("keyed", [pa.field(_TIMER, pa.int64()), *places, *lists]),
            _TIMERS: TableSpec("timed", []),
            GIVEN_UP: GIVEN_UP_SPEC,
            **source.tables(),
        }

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The matches that the watermark makes certain."""
        rules = RuleVersions(state, self._form, self._source)
        rules.learn(inputs[1], time)
        self._wait(state, inputs[0], time)
        versions = rules.during(time)
        due, timers = state[_WAITING].take(time.until), state[_TIMERS].take(time.until)
        ended = [each.number for each in versions if each.closed <= time.until]
        keys = Keys.of(pa.concat_tables([due.select([H1, H2]), timers.select([H1, H2]), _touched(state, ended)]))
        if not len(keys):
            return self.schema.empty_table()
        work = self._work(state, keys, due)
        found, needs = [self.schema.empty_table()], _Needs(work, time)
        for version in versions:
            search = _RuleSearch(work, version, time)
            matches = search.matches()
            if matches is not None:
                found.append(self._result(search, matches, rules.rows))
                note_given_up(state[GIVEN_UP], keys, *search.given_up(matches))
            needs.add(version, search, matches)
        self._keep(state, keys, work, needs)
        return pa.concat_tables(found)

    def _wait(self, state: State, rows: pa.Table, time: Time) -> None:
        times = times_of(rows, self.at)
        columns = {f"r{number}": rows.column(name) for number, name in enumerate(self._form.events.names)}
        kept = pa.table({H1: rows.column(H1), H2: rows.column(H2), AT: pa.array(times, pa.int64()), **columns})
        state[_WAITING].put(kept.filter(pa.array(times > time.before)))

    def _work(self, state: State, keys: Keys, due: pa.Table) -> _RuleWork:
        """The rows of keys, in the order of the search, and where the searches of versions go on."""
        row, own = keys.row[: due.num_rows], [f"r{number}" for number in range(len(self._form.events))]
        if not self._in_log_order:
            order = in_fixed_order(due.append_column("_row", pa.array(np.arange(due.num_rows))), AT, by_key=True)
            due, row = order.drop_columns(["_row"]), keys.row[column(order, "_row")]
        found, number = state[_OPEN].find(keys)
        lists = [found.column(f"l{at}") for at in range(len(own) + 1)]
        lengths = pc.list_value_length(lists[0]).to_numpy() if found.num_rows else np.zeros(0, np.int64)
        held = pa.table({name: flattened(each) for name, each in zip([AT, *own], lists, strict=True)})
        rows = pa.concat_tables([held.cast(due.select([AT, *own]).schema), due.select([AT, *own])])
        key = np.r_[np.repeat(number, lengths), row].astype(np.int64)
        order = np.lexsort((column(rows, AT), key))
        rows, key = rows.take(pa.array(order)), key[order]
        first = np.searchsorted(key, np.arange(len(keys) + 1))
        fresh, timer, is_held = first[:-1].copy(), np.full(len(keys), MIN_TIME), np.zeros(len(keys), bool)
        fresh[number] += lengths
        is_held[number] = True
        if found.num_rows:
            timer[number] = column(found, _TIMER)
        many = pc.list_value_length(found.column(_VERSION)).to_numpy() if found.num_rows else lengths
        owner = np.repeat(number, many).astype(np.int64)
        start = flattened(found.column(_START)).to_numpy(zero_copy_only=False) + first[owner]
        table = pa.table({name: rows.column(place) for place, name in zip(own, self._form.events.names, strict=True)})
        places = flattened(found.column(_VERSION)).to_numpy(zero_copy_only=False), owner, start
        return _RuleWork(rows, table, key, first, fresh, timer, is_held, places)

    def _result(self, search: _RuleSearch, matches: Matches, rules: pa.Table) -> pa.Table:
        """The matches of a version that are new."""
        match, points, row = search.points(matches)
        work, version = search.work, search.version
        terms = version.plan.detect.measures.columns(work.table_of(version.plan.detect), points)
        rule = pa.array(np.full(len(match), version.row))
        columns: dict[str, Any] = {RULE: rules.column(RULE).take(rule)}
        columns |= {field.name: rules.column(f"c{at}").take(rule) for at, field in enumerate(self._source.own)}
        columns |= {name: work.table.column(name).take(pa.array(row)) for name in self._form.key}
        for field in self._form.measures:
            measure = version.plan.measures.get(field.name)
            if measure is None:
                columns[field.name] = pa.nulls(len(match), field.type)
            else:
                columns[field.name] = measure.try_evaluate({name: terms[name] for name in measure.columns}, len(match))
        moments = pa.array(search.moments(matches)[match], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        return pa.table({**columns, MATCHED_AT: moments}).cast(self.schema)

    def _keep(self, state: State, keys: Keys, work: _RuleWork, needs: _Needs) -> None:
        """Keeps the rows of each key that a later batch needs, and forgets the others."""
        lengths = work.first[1:] - needs.first
        is_kept = lengths > 0
        state[_OPEN].remove(keys.only(work.is_held & ~is_kept))
        if not bool(is_kept.any()):
            return
        is_wanted = is_kept & (needs.timer < MAX_TIME) & (needs.timer != work.timer)
        timer = np.where(is_wanted, needs.timer, work.timer)
        wanted = {H1: keys.h1[is_wanted], H2: keys.h2[is_wanted], AT: timer[is_wanted]}
        state[_TIMERS].put(pa.table({name: pa.array(each, pa.int64()) for name, each in wanted.items()}))
        place = np.repeat(needs.first - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
        offsets = pa.array(np.r_[0, np.cumsum(lengths[is_kept])], pa.int32())
        own = work.rows.take(pa.array(place))
        columns: dict[str, Any] = {H1: keys.h1[is_kept], H2: keys.h2[is_kept], _TIMER: timer[is_kept]}
        columns = {name: pa.array(each, pa.int64()) for name, each in columns.items()}
        version, owner, start = needs.places()
        ends = pa.array(np.r_[0, np.cumsum(np.bincount(owner, minlength=len(keys))[is_kept])], pa.int32())
        for name, each in ((_VERSION, version), (_START, start - needs.first[owner])):
            columns[name] = pa.ListArray.from_arrays(ends, pa.array(each, pa.int64()))
        for number, name in enumerate(own.column_names):
            columns[f"l{number}"] = pa.ListArray.from_arrays(offsets, own.column(name).combine_chunks())
        state[_OPEN].put(pa.table(columns))


def _touched(state: State, ended: Sequence[int]) -> pa.Table:
    """The keys at which versions that end have something open."""
    found = [state[_OPEN].empty().select([H1, H2])]
    for piece in state[_OPEN].pieces() if ended else ():
        owner = np.repeat(np.arange(piece.num_rows), pc.list_value_length(piece.column(_VERSION)).to_numpy())
        is_ended = np.isin(flattened(piece.column(_VERSION)).to_numpy(zero_copy_only=False), ended)
        found.append(piece.select([H1, H2]).take(pa.array(np.unique(owner[is_ended]))))
    return pa.concat_tables(found)


class _RuleWork:
    """The rows that a batch looks at. `fresh` is for each key its first row that no batch has looked at."""

    def __init__(
        self, rows: pa.Table, table: pa.Table, key: Array, first: Array, fresh: Array, timer: Array, is_held: Array,
        places: tuple[Array, Array, Array],
    ) -> None:  # fmt: skip
        self.rows, self.table, self.key, self.first = rows, table, key, first
        self.fresh, self.timer, self.is_held = fresh, timer, is_held
        self.times = column(rows, AT)
        self.row = np.arange(len(key))
        order = np.argsort(places[0], kind="stable")
        self._version, self._owner, self._start = (each[order] for each in places)
        self._values, self._masks = dict[str, pa.Array](), dict[Any, Array]()
        self._within = dict[int, Array]()

    def starts(self, version: int) -> Array:
        """For each key the row at which the search of a version goes on."""
        found = self.fresh.copy()
        place = slice(np.searchsorted(self._version, version), np.searchsorted(self._version, version, "right"))
        found[self._owner[place]] = self._start[place]
        return found

    def bounds(self, low: int, last: int) -> tuple[Array, Array, bool]:
        """For each key the rows from `low` to `last`, as bounds, and whether these are all."""
        if not len(self.times) or (low <= self.times.min() and self.times.max() <= last):
            return self.first[:-1], self.first[1:], True
        early, late = (np.r_[0, np.cumsum(mask)] for mask in (self.times < low, self.times > last))
        begin = self.first[:-1] + np.diff(early[self.first])
        return begin, self.first[1:] - np.diff(late[self.first]), False

    def within(self, within_us: int) -> Array:
        """For each row the bound after the last row of its key that is at most so much later; computed once."""
        if within_us not in self._within:
            self._within[within_us] = last_within(self.times, self.key, self.first, within_us)
        return self._within[within_us]

    def table_of(self, plan: DetectPlan) -> pa.Table:
        """The rows with the columns that a plan computes; equal values are computed once."""
        table = self.table
        for name, each in plan.computed.items():
            if each.sql not in self._values:
                columns = {column_: self.table.column(column_) for column_ in each.columns}
                self._values[each.sql] = each.try_evaluate(columns, self.table.num_rows)
            table = table.append_column(name, self._values[each.sql])
        return table

    def mask(self, condition: RowCondition, plan: DetectPlan, version: RuleVersion) -> Array:
        """Which rows satisfy a condition; equal ones are computed once."""
        low = high = self.row
        of = None
        if condition.is_of_neighbours:
            begin, end, is_all = self.bounds(version.low, version.last)
            low, high = begin[self.key], end[self.key]
            of = None if is_all else (version.low, version.last)
        key = condition.key, of
        if key not in self._masks:
            self._masks[key] = condition.holds(self.table_of(plan), low, high)
        return self._masks[key]


class _RuleSearch:
    """The search of one version. Rows of the search are numbered apart; `_place` has for each its row in the work."""

    def __init__(self, work: _RuleWork, version: RuleVersion, time: Time) -> None:
        self.work, self.version, self._time = work, version, time
        self.is_over = version.closed <= time.until
        self.begin, self.end, _ = work.bounds(version.low, version.last)
        self.start = np.clip(work.starts(version.number), self.begin, self.end)
        self._place = np.zeros(0, np.int64)
        self._key = np.zeros(0, np.int64)

    def matches(self) -> Matches | None:
        """The matches; None where there is nothing to search."""
        work, plan = self.work, self.version.plan.detect
        first = np.where(self.start < self.end, np.maximum(self.start - plan.behind, self.begin), self.end)
        is_taken = (work.row >= first[work.key]) & (work.row < self.end[work.key])
        taken = np.r_[0, np.cumsum(is_taken)]
        place = self._place = np.flatnonzero(is_taken)
        if not len(place):
            return None
        holds = self._holds(place)
        if not self._may_begin(holds):
            return None
        self._key = taken[work.first]
        rows = SearchRows(
            holds, work.times[place], self._key, taken[self.start], np.zeros(len(self.start), bool), self._time.until,
            self.is_over, self._within(place, taken),
        )  # fmt: skip
        if not plan.of_match and not plan.automaton.waits:
            return find_matches(plan.automaton, plan.rule, rows)
        key = work.key[place]
        table = work.table_of(plan).take(pa.array(place))
        low, high = self._key[:-1][key], self._key[1:][key]
        trace = Trace(plan.automaton, list(plan.of_match.values()), table, plan.names, low, high)
        return find_by_trying(plan.automaton, plan.rule, rows, trace, plan.of_match)

    def _within(self, place: Array, taken: Array) -> Array | None:
        within_us = self.version.plan.detect.rule.within_us
        if within_us is None:
            return None
        return taken[np.minimum(self.work.within(within_us), self.end[self.work.key])[place]]

    def _holds(self, place: Array) -> Array:
        plan = self.version.plan.detect
        found = np.ones((len(place), len(plan.automaton.variables)), bool)
        for number, variable in enumerate(plan.automaton.variables):
            condition = plan.conditions.get(variable.removeprefix(ABSENT))
            if condition is not None:
                found[:, number] = self.work.mask(condition, plan, self.version)[place]
            if variable.startswith(ABSENT):
                found[:, number] = ~found[:, number]
        return found

    def _may_begin(self, holds: Array) -> bool:
        """Whether a match can begin at any row. With NEXT the last rows are not known yet."""
        plan = self.version.plan.detect
        first = plan.automaton.first
        if plan.rule.ahead or any(target >= plan.automaton.accept for target in first):
            return True
        return bool(holds[:, [plan.automaton.position[target] for target in first]].any())

    def open(self, matches: Matches | None) -> Array:
        """For each key the row at which the search goes on in a later batch, or the end."""
        if matches is None or self.is_over:
            return self.end
        place = np.r_[self._place, 0][np.minimum(matches.open, len(self._place))]
        return np.where(matches.open < self._key[1:], place, self.end)

    def moments(self, matches: Matches) -> Array:
        """For each match the time from which on it is certain: at the latest when the version is closed."""
        decided = np.minimum(matches.decided, self.version.closed)
        last = self.work.times[self.end[self.work.key[self._place[matches.start]]] - 1]
        return np.where(decided == MAX_TIME, last, decided)

    def points(self, matches: Matches) -> tuple[Array, MeasurePoints, Array]:
        """The matches that are new, where their measures are computed, and the row of each at which it begins."""
        plan, work = self.version.plan.detect, self.work
        lengths = np.diff(matches.offset)
        is_new = self._is_new(matches.decided) & ((lengths > 0) | (plan.empty != "omit"))
        if plan.automaton.waits:
            is_new &= matches.decided <= self.version.last
        match = np.flatnonzero(is_new)
        row = self._place[matches.start]
        variable = np.array(plan.automaton.position, np.int64)[matches.position]
        low, high = self.begin[work.key[row]], self.end[work.key[row]]
        number, path = np.zeros(len(row), np.int64), self._place[matches.path]
        return (
            match,
            MeasurePoints(match, lengths[match], number, matches.offset, path, variable, low, high),
            row[match],
        )

    def given_up(self, matches: Matches) -> tuple[Array, Array]:
        """The keys of starts that were given up, and when."""
        is_new = self._is_new(matches.given_up_at)
        at = np.minimum(matches.given_up_at[is_new], self.version.closed)
        return self.work.key[self._place[matches.given_up[is_new]]], at

    def _is_new(self, decided: Array) -> Array:
        return (decided > self._time.before) & (np.minimum(decided, self.version.closed) <= self._time.until)


class _Needs:
    """What later batches need of the rows: for each key the first row, the next timer, and the places of versions."""

    def __init__(self, work: _RuleWork, time: Time) -> None:
        self._work, self._time = work, time
        self.first = work.first[1:].copy()
        self.timer = np.full(len(self.first), MAX_TIME)
        self._places: list[tuple[Array, Array, Array]] = []

    def add(self, version: RuleVersion, search: _RuleSearch, matches: Matches | None) -> None:
        """What a version needs."""
        plan, work = version.plan.detect, self._work
        if search.is_over:
            return
        start = search.open(matches)
        np.minimum(self.first, np.maximum(start - plan.behind, search.begin), out=self.first)
        key = np.flatnonzero(start < search.end)
        if not len(key):
            return
        self._places.append((np.full(len(key), version.number), key, start[key]))
        if plan.rule.within_us is not None:
            ends = work.times[start[key]] + plan.rule.within_us
            ends = np.where(ends > self._time.until, ends, MAX_TIME)
            self.timer[key] = np.minimum(self.timer[key], ends)

    def places(self) -> tuple[Array, Array, Array]:
        """The versions, keys and rows at which searches go on, in the order of keys."""
        none = np.zeros(0, np.int64)
        version, key, start = (np.concatenate([none, *(each[at] for each in self._places)]) for at in range(3))
        order = np.argsort(key, kind="stable")
        return version[order], key[order], start[order]
