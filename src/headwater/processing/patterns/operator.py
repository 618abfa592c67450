"""The operator behind `hw.detect`: rows wait until the watermark has passed them, then the matcher searches the rows of their keys.

A result is given in the batch whose watermark makes it certain, once. Its time `matched_at` is that moment in event time: the time of the
last row that had to be known, or the end of WITHIN. So a result is never late for an operator that follows.

State:
- `waiting`: rows that the watermark has not passed.
- `open`: for each key the rows from the first at which a match may still begin, as lists; and the rows before it that PREV needs.
- `timers`: when WITHIN ends for the first of those rows, so that a key without new rows is looked at.
- `given_up`: the keys of which starts were given up, with how many and when the last one.
- `partitions`: only for MATCH_NUMBER and ^: how many matches each key had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.clock import NO_TIME
from headwater.processing.operators.operator import MAX_TIME, Time
from headwater.processing.operators.row_order import in_fixed_order, times_of
from headwater.processing.patterns.automaton import Automaton
from headwater.processing.patterns.conditions import RowCondition, rows_that_hold
from headwater.processing.patterns.grammar import EmptyMatches, Order
from headwater.processing.patterns.machine import find_by_trying
from headwater.processing.patterns.matcher import find_matches
from headwater.processing.patterns.measures import MeasurePoints, Measures
from headwater.processing.patterns.outcome import Matches, Rule, SearchRows
from headwater.processing.patterns.trace import MatchCondition, Trace
from headwater.processing.state.sorted_runs import AT, H1, H2, MIN_TIME, Keys, column
from headwater.processing.state.state import State, StateTable, TableSpec

MATCHED_AT = "matched_at"
"""The event time of a result."""
TIMED_OUT = "timed_out"
"""With `timeouts=True`: whether a result was not complete when its time was over."""
_WAITING, _OPEN, _TIMERS, _PARTITIONS = "waiting", "open", "timers", "partitions"
_TIMER, _CONTEXT, _COVERED, _COUNT = "timer", "context", "covered", "count"
GIVEN_UP = "given_up"
GIVEN_UP_SPEC = TableSpec("keyed", [pa.field(_COUNT, pa.int64()), pa.field("last", pa.int64())])
"""The table of keys of which starts were given up."""

Array = Any
"""A NumPy array."""


class DetectPlan(NamedTuple):
    """What a pattern comes to: everything the operator needs."""

    text: str
    key: Sequence[str]
    order: Sequence[Order]
    automaton: Automaton
    rule: Rule
    computed: Mapping[str, Any]
    """Columns that are computed of each row before anything else, as expressions."""
    conditions: Mapping[str, RowCondition]
    measures: Measures
    is_all_rows: bool = False
    empty: EmptyMatches = "show"
    behind: int = 0
    """How many rows before its start a match refers to."""
    has_partitions: bool = False
    """Whether each key's matches are counted, for ever."""
    in_log_order: bool = True
    of_match: Mapping[int, MatchCondition] = {}
    """The conditions that depend on the match, by the numbers of their variables."""
    names: Sequence[str] = ()
    """The variables as they are shown."""


class Detect:
    """The operator."""

    name = "detect"
    keeps = MATCHED_AT

    def __init__(self, schema: pa.Schema, plan: DetectPlan) -> None:
        self._plan, self._own = plan, schema.names
        self.settings = (plan.text, plan.rule.within_us, plan.rule.rows_max, plan.rule.timeouts)
        self.at = plan.order[0].column
        shown = list(schema) if plan.is_all_rows else [schema.field(name) for name in plan.key]
        computed = [pa.field(name, each.type) for name, each in plan.computed.items()]
        moment = pa.field(MATCHED_AT, pa.timestamp("us", tz="UTC"))
        terms = plan.measures.fields(pa.schema([*schema, *computed]))
        more = [pa.field(TIMED_OUT, pa.bool_())] if plan.rule.timeouts else []
        self.schema = pa.schema([*(field.with_nullable(True) for field in shown), *terms, moment, *more])
        own = [pa.field(f"r{number}", field.type) for number, field in enumerate(schema)]
        numbers = [pa.field(name, pa.int64()) for name in (_TIMER, _CONTEXT, _COVERED)]
        lists = [pa.field(field.name, pa.list_(field.type)) for field in [pa.field(AT, pa.int64()), *own]]
        lists = [field.with_name(f"l{number}") for number, field in enumerate(lists)]
        self.tables = {
            _WAITING: TableSpec("timed", own),
            _OPEN: TableSpec("keyed", [*numbers, *lists]),
            _TIMERS: TableSpec("timed", []),
            GIVEN_UP: GIVEN_UP_SPEC,
        }
        if plan.has_partitions:
            self.tables[_PARTITIONS] = TableSpec("keyed", [pa.field(_COUNT, pa.int64())])

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The matches that the watermark makes certain."""
        self._wait(state, inputs[0], time)
        due = state[_WAITING].take(time.until)
        timers = state[_TIMERS].take(time.until)
        parts = [due.select([H1, H2]), timers.select([H1, H2])]
        if time.until == MAX_TIME:
            parts.append(state[_OPEN].rows().select([H1, H2]))
        keys = Keys.of(pa.concat_tables(parts))
        if not len(keys):
            return self.schema.empty_table()
        work = self._work(state, keys, due, time)
        matches = self._matches(work)
        result = self._result(state, keys, work, matches, time)
        is_new = (matches.given_up_at > time.before) & (matches.given_up_at <= time.until)
        note_given_up(state[GIVEN_UP], keys, work.key[matches.given_up[is_new]], matches.given_up_at[is_new])
        self._keep(state, keys, work, matches, time)
        return result

    def _matches(self, work: _Work) -> Matches:
        plan, rows = self._plan, work.rows
        if not plan.of_match and not plan.automaton.waits:
            return find_matches(plan.automaton, plan.rule, rows)
        low, high = rows.key[:-1][work.key], rows.key[1:][work.key]
        trace = Trace(plan.automaton, list(plan.of_match.values()), work.table, plan.names, low, high)
        return find_by_trying(plan.automaton, plan.rule, rows, trace, plan.of_match)

    def _wait(self, state: State, rows: pa.Table, time: Time) -> None:
        times = times_of(rows, self.at)
        columns = {f"r{number}": rows.column(name) for number, name in enumerate(self._own)}
        kept = pa.table({H1: rows.column(H1), H2: rows.column(H2), AT: pa.array(times, pa.int64()), **columns})
        is_due_later = times > time.before
        state[_WAITING].put(kept if bool(is_due_later.all()) else kept.filter(pa.array(is_due_later)))

    def _work(self, state: State, keys: Keys, due: pa.Table, time: Time) -> _Work:
        """The rows of keys, in the order of the search, and what is known of them."""
        if not self._plan.in_log_order:
            order = in_fixed_order(due.append_column("_row", pa.array(np.arange(due.num_rows))), AT, by_key=True)
            due, row = order.drop_columns(["_row"]), keys.row[column(order, "_row")]
        else:
            row = keys.row[: due.num_rows]
        found, number = state[_OPEN].find(keys)
        lists = [found.column(f"l{at}").combine_chunks() for at in range(len(self._own) + 1)]
        lengths = pc.list_value_length(lists[0]).to_numpy() if found.num_rows else np.zeros(0, np.int64)
        names = [AT, *(f"r{at}" for at in range(len(self._own)))]
        held = pa.table({name: flattened(each) for name, each in zip(names, lists, strict=True)})
        rows = pa.concat_tables([held.cast(due.select(names).schema), due.select(names)])
        key = np.r_[np.repeat(number, lengths), row].astype(np.int64)
        order = self._order(rows, key)
        rows, key = rows.take(pa.array(order)), key[order]
        first = np.searchsorted(key, np.arange(len(keys) + 1))
        context, covered, timer = np.zeros((3, len(keys)), np.int64)
        timer[:] = MIN_TIME
        if found.num_rows:
            context[number], covered[number] = column(found, _CONTEXT), column(found, _COVERED)
            timer[number] = column(found, _TIMER)
        is_begin, counts = np.zeros(len(keys), bool), np.zeros(len(keys), np.int64)
        if self._plan.has_partitions:
            known, place = state[_PARTITIONS].find(keys)
            is_begin[:] = True
            is_begin[place], counts[place] = False, column(known, _COUNT)
        table = pa.table({name: rows.column(f"r{at}") for at, name in enumerate(self._own)})
        for name, each in self._plan.computed.items():
            table = table.append_column(name, each.evaluate({n: table.column(n) for n in each.columns}, table.num_rows))
        low, high = first[:-1][key], first[1:][key]
        holds = rows_that_hold(self._plan.automaton.variables, self._plan.conditions, table, low, high)
        data = SearchRows(
            holds, column(rows, AT), first, first[:-1] + context, is_begin, time.until, time.until == MAX_TIME
        )  # fmt: skip
        held_of = np.zeros(len(keys), bool)
        held_of[number] = True
        return _Work(data, table, rows, key, counts, first[:-1] + covered, timer, held_of)

    def _order(self, rows: pa.Table, key: Array) -> Array:
        """Rows by key, by time and by the further columns of ORDER BY; equal ones as they came."""
        ranks = [_rank(rows.column(f"r{self._own.index(each.column)}"), each) for each in self._plan.order[1:]]
        return np.lexsort((*reversed(ranks), column(rows, AT), key))

    def _result(self, state: State, keys: Keys, work: _Work, matches: Matches, time: Time) -> pa.Table:
        plan = self._plan
        is_new = (matches.decided > time.before) & (matches.decided <= time.until)
        key = work.key[matches.start]
        number = _places(key, is_new) + work.counts[key]
        if plan.has_partitions:
            work.counts[:] += np.bincount(key[is_new], minlength=len(work.counts))
        variable = np.array(plan.automaton.position, np.int64)[matches.position]
        low, high = work.rows.key[:-1][key], work.rows.key[1:][key]
        lengths = np.diff(matches.offset)
        is_shown = is_new & ((lengths > 0) | (plan.empty != "omit"))
        if not plan.is_all_rows:
            match = np.flatnonzero(is_shown)
            row, counted = matches.start[match], lengths[match]
        else:
            match, row, counted = self._all_rows(work, matches, is_shown, time)
        points = MeasurePoints(match, counted, number, matches.offset, matches.path, variable, low, high)
        names = self._own if plan.is_all_rows else plan.key
        columns = {name: work.table.column(name).take(pa.array(row)) for name in names}
        decided = np.where(match < 0, work.decided_of_failed[row], np.r_[matches.decided, 0][match])
        last = work.rows.times[work.rows.key[1:][work.key[row]] - 1]
        shown = np.where(decided == MAX_TIME, last, decided)
        moments = pa.array(shown, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        more = {TIMED_OUT: pa.array(np.r_[matches.is_timeout, False][match])} if plan.rule.timeouts else {}
        return pa.table({**columns, **plan.measures.columns(work.table, points), MATCHED_AT: moments, **more})

    def _all_rows(self, work: _Work, matches: Matches, is_shown: Array, time: Time) -> tuple[Array, Array, Array]:
        """For each row of the output its match, its row, and how many rows of its match count; in the order of rows and matches."""
        lengths = np.diff(matches.offset)
        match = np.repeat(np.arange(len(lengths)), lengths)
        counted = np.arange(len(match)) - matches.offset[:-1][match] + 1
        is_there = is_shown[match] & ~np.array(self._plan.automaton.is_hidden, bool)[matches.position]
        empty = np.flatnonzero(is_shown & (lengths == 0))
        found = [np.r_[match[is_there], empty], np.r_[matches.path[is_there], matches.start[empty]]]
        found.append(np.r_[counted[is_there], np.zeros(len(empty), np.int64)])
        if self._plan.empty == "unmatched":
            covered = np.zeros(len(work.key) + 1, np.int64)
            np.add.at(covered, matches.start, 1)
            np.add.at(covered, matches.end, -1)
            is_covered = np.cumsum(covered)[:-1] > 0
            is_covered |= np.arange(len(work.key)) < work.covered[work.key]
            is_new = (matches.failed_at > time.before) & (matches.failed_at <= time.until)
            alone = matches.failed[is_new & ~is_covered[matches.failed]]
            work.decided_of_failed[matches.failed] = matches.failed_at
            found = [np.r_[found[0], np.full(len(alone), -1)], np.r_[found[1], alone], np.r_[found[2], alone * 0]]
        order = np.lexsort((found[1], np.where(found[0] < 0, found[1], np.r_[matches.start, 0][found[0]])))
        return found[0][order], found[1][order], found[2][order]

    def _keep(self, state: State, keys: Keys, work: _Work, matches: Matches, time: Time) -> None:
        """Keeps the rows of each key that a later batch needs, and forgets the others."""
        rows, plan = work.rows, self._plan
        start = np.minimum(matches.open, rows.key[1:])
        first = np.maximum(start - plan.behind, rows.key[:-1])
        lengths = rows.key[1:] - first
        if plan.has_partitions:
            moved = (start > rows.start) | ~rows.is_begin
            kept = {H1: pa.array(keys.h1[moved]), H2: pa.array(keys.h2[moved]), _COUNT: pa.array(work.counts[moved])}
            state[_PARTITIONS].put(pa.table(kept))
        is_kept = lengths > 0
        state[_OPEN].remove(keys.only(work.is_held & ~is_kept))
        if not bool(is_kept.any()):
            return
        timer = work.timer
        if plan.rule.within_us is not None:
            is_open = start < rows.key[1:]
            ends = rows.times[np.minimum(start, len(rows.times) - 1)] + plan.rule.within_us
            is_wanted = is_open & (ends > time.until) & (ends != timer)
            timer = np.where(is_wanted, ends, timer)
            wanted = {H1: keys.h1[is_wanted], H2: keys.h2[is_wanted], AT: ends[is_wanted]}
            state[_TIMERS].put(pa.table({name: pa.array(each, pa.int64()) for name, each in wanted.items()}))
        covered = np.copy(work.covered)
        np.maximum.at(covered, work.key[matches.start], matches.end)
        place = np.repeat(first - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
        offsets = pa.array(np.r_[0, np.cumsum(lengths[is_kept])], pa.int32())
        own = work.own.take(pa.array(place))
        columns: dict[str, Any] = {H1: keys.h1, H2: keys.h2, _TIMER: timer, _CONTEXT: start - first}
        columns[_COVERED] = np.maximum(covered - first, 0)
        columns = {name: pa.array(each[is_kept], pa.int64()) for name, each in columns.items()}
        for number, name in enumerate(own.column_names):
            columns[f"l{number}"] = pa.ListArray.from_arrays(offsets, own.column(name).combine_chunks())
        state[_OPEN].put(pa.table(columns))


class _Work:
    """The rows that a batch looks at."""

    def __init__(
        self, rows: SearchRows, table: pa.Table, own: pa.Table, key: Array, counts: Array, covered: Array, timer: Array,
        is_held: Array,
    ) -> None:  # fmt: skip
        self.rows, self.table, self.own, self.key = rows, table, own, key
        self.counts, self.covered, self.timer, self.is_held = counts, covered, timer, is_held
        self.decided_of_failed = np.full(len(key), NO_TIME)


def note_given_up(table: StateTable, keys: Keys, key: Array, at: Array) -> None:
    """Counts starts that were given up at some times; `key` has the numbers of their keys."""
    if not len(key):
        return
    counts, last = np.bincount(key, minlength=len(keys)), np.full(len(keys), NO_TIME)
    np.maximum.at(last, key, at)
    found, number = table.find(keys)
    counts[number] += column(found, _COUNT) * (counts[number] > 0)
    one = np.flatnonzero(counts)
    rows = {H1: keys.h1[one], H2: keys.h2[one], _COUNT: counts[one], "last": last[one]}
    table.put(pa.table({name: pa.array(each, pa.int64()) for name, each in rows.items()}))


def flattened(lists: Any) -> pa.Array:
    """The elements of lists, one after the other."""
    if isinstance(lists, pa.ChunkedArray):
        lists = pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.array([], lists.type)
    return lists.flatten()


def _rank(values: pa.ChunkedArray, order: Order) -> Array:
    """Numbers in the order of values, as Spark has it: NaN is above all numbers."""
    values = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    is_null = pc.is_null(values).to_numpy(zero_copy_only=False)
    if pa.types.is_floating(values.type):
        numbers = values.fill_null(0).to_numpy()
    else:
        encoded = values.dictionary_encode()
        ranks = np.empty(len(encoded.dictionary), np.int64)
        ranks[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(ranks))
        numbers = np.r_[ranks, 0][encoded.indices.fill_null(0).to_numpy()]
    _, place = np.unique(numbers, return_inverse=True)
    place = -place if order.is_descending else place
    return np.where(is_null, -len(place) - 1 if order.nulls_first else len(place) + 1, place)


def _places(key: Array, counts: Array) -> Array:
    """For each match its number among those of its key that count, from 1 on; keys are in order."""
    total = np.cumsum(counts)
    first = np.r_[0, np.flatnonzero(np.diff(key)) + 1][: len(key)]
    before = np.repeat(total[first] - counts[first], np.diff(np.r_[first, len(key)])) if len(key) else total
    return total - before
