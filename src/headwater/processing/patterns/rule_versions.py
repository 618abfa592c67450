"""The versions of rules in the state of an operator: which rule holds when.

A version holds for the rows from `low` to `last`, in event time. It begins at its own time and is closed at that of the next version of the
rule, or of its removal. A change that comes after the watermark has passed its time holds from just after the watermark.

A version whose text has no plan is parked with its reason: no rule of that name holds until the next version.

State, the same in every partition: `rules`, the versions in the order in which they came; `parked`, the rules whose last version has
no plan; `rule_summary`, one row with the number of versions that came, and of rules that hold and that are parked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.model.clock import NO_TIME
from headwater.model.schema import DELETED
from headwater.processing.operators.operator import MAX_TIME, Time
from headwater.processing.operators.row_order import in_fixed_order, times_of
from headwater.processing.patterns.rule_plan import RuleForm, RulePlan, rule_plan
from headwater.processing.spark.hashing import hashes_of
from headwater.processing.state.sorted_runs import AT, H1, H2, MIN_TIME, Keys, column
from headwater.processing.state.state import State, TableSpec

RULE, PATTERN, REASON = "rule", "pattern", "reason"
"""The columns of the table of rules, its key and its text; and why a rule is parked."""

_RULES, _PARKED, _SUMMARY = "rules", "parked", "rule_summary"
_SINCE, _LOW, _GONE = "since", "low", "gone"


class RuleVersion(NamedTuple):
    """A version that holds: for the rows from `low` to `last`. By `closed` it is certain that this is the last."""

    number: int
    """By it the state knows the version: it is the same in every partition."""
    low: int
    last: int
    closed: int
    plan: RulePlan
    row: int
    """Its row in the table of versions."""


class RuleSource(NamedTuple):
    """How changes of rules are read: the rule's own columns, their time, and whether the rule comes first at equal times."""

    own: tuple[pa.Field, ...]
    at: str
    is_rule_first: bool
    in_log_order: bool
    deletes: bool

    def tables(self) -> dict[str, TableSpec]:
        """The tables of the state."""
        own = [pa.field(f"c{number}", field.type) for number, field in enumerate(self.own)]
        numbers = [pa.field(name, pa.int64()) for name in (_SINCE, _LOW)]
        texts = [pa.field(name, pa.string()) for name in (RULE, PATTERN, REASON)]
        more = [pa.field(_GONE, pa.bool_()), *texts[:2], *own]
        counts = [pa.field(name, pa.int64()) for name in ("versions", "rules", "parked")]
        return {
            _RULES: TableSpec("timed", [*numbers, *more], is_copied=True),
            _PARKED: TableSpec("keyed", texts, is_copied=True),
            _SUMMARY: TableSpec("keyed", counts, is_copied=True),
        }


class RuleVersions:
    """The versions in one partition of the state."""

    def __init__(self, state: State, form: RuleForm, source: RuleSource) -> None:
        self._versions, self._parked, self._summary = state[_RULES], state[_PARKED], state[_SUMMARY]
        self._form, self._source = form, source
        rows = self._summary.rows().to_pylist()
        self._count = rows[0]["versions"] if rows else 0
        self.rows = self._versions.empty()
        """Those that matter for a batch, after `during`."""

    def learn(self, changes: pa.Table, time: Time) -> None:
        """Puts changes of rules into the state."""
        count, source = changes.num_rows, self._source
        if not count:
            return
        if not source.in_log_order:
            changes = in_fixed_order(changes, source.at)
        since = times_of(changes, source.at)
        low = since if time.before == NO_TIME else np.maximum(since, time.before + 1)
        low = low + (0 if source.is_rule_first else 1)
        is_gone = np.zeros(count, bool)
        if source.deletes:
            is_gone = changes.column(DELETED.name).fill_null(False).to_numpy(zero_copy_only=False)
        h1, h2 = hashes_of([_whole(changes.column(RULE))])
        texts, reasons = [], []
        for text, gone in zip(changes.column(PATTERN).to_pylist(), is_gone.tolist(), strict=True):
            plan = None if gone else rule_plan(text or "", self._form)
            texts.append(text if isinstance(plan, RulePlan) else None)
            reasons.append(plan if isinstance(plan, str) else None)
        columns: dict[str, Any] = {H1: h1, H2: h2, AT: self._count + 1 + np.arange(count), _SINCE: since, _LOW: low}
        columns = {name: pa.array(each, pa.int64()) for name, each in columns.items()}
        columns |= {_GONE: pa.array(is_gone), RULE: changes.column(RULE), PATTERN: pa.array(texts, pa.string())}
        columns |= {f"c{number}": changes.column(field.name) for number, field in enumerate(source.own)}
        self._versions.put(pa.table(columns))
        self._count += count
        said = {H1: columns[H1], H2: columns[H2], RULE: columns[RULE], PATTERN: changes.column(PATTERN)}
        self._park(pa.table({**said, REASON: pa.array(reasons, pa.string())}), since)

    def _park(self, rows: pa.Table, since: Any) -> None:
        """Of each rule that changed the last version counts."""
        keys = Keys.of(rows)
        rank = np.empty(len(since), np.int64)
        order = np.argsort(since, kind="stable")
        rank[order] = np.arange(len(since))
        last = np.full(len(keys), -1)
        np.maximum.at(last, keys.row, rank)
        last = order[last]
        is_parked = np.asarray(rows.column(REASON).is_valid())[last]
        self._parked.remove(keys.only(~is_parked))
        self._parked.put(rows.take(pa.array(np.sort(last[is_parked]))))

    def during(self, time: Time) -> list[RuleVersion]:
        """The versions that hold for rows that a batch may look at; what no later batch needs is forgotten."""
        rows = self.rows = self._versions.between(MIN_TIME, MAX_TIME)
        h1, h2, low = column(rows, H1), column(rows, H2), column(rows, _LOW)
        order = np.lexsort((column(rows, AT), column(rows, _SINCE), h2, h1))
        last = _ends(h1, h2, low, order)
        is_valid = np.asarray(rows.column(PATTERN).is_valid())
        closed = np.where(last == MAX_TIME, MAX_TIME, last + int(self._source.is_rule_first))
        is_first = np.zeros(len(low), bool)
        is_first[
            order[np.r_[True, np.diff(h1[order]) != 0] | np.r_[True, np.diff(h2[order]) != 0]] if len(low) else order
        ] = True
        # What closes a version stays until that one is gone: tables are tidied run by run.
        is_kept = (last >= low) & (closed > time.until) & (is_valid | (low > time.until) | ~is_first)
        kept = column(rows, AT)[is_kept]
        self._versions.keeps = lambda table: pa.array(np.isin(column(table, AT), kept))
        holds = np.flatnonzero(is_valid & (last >= low) & (low <= time.until) & (closed > time.before))
        self._save(int(np.count_nonzero(is_valid & is_kept)))
        number = hashes_of([pa.array(each) for each in (h1, h2, low)])[0] if len(low) else low
        texts = rows.column(PATTERN)
        found = list[RuleVersion]()
        for row in holds.tolist():
            plan = rule_plan(texts[row].as_py(), self._form)
            assert isinstance(plan, RulePlan)
            found.append(RuleVersion(int(number[row]), int(low[row]), int(last[row]), int(closed[row]), plan, row))
        return found

    def _save(self, rules: int) -> None:
        row = {H1: 0, H2: 0, "versions": self._count, "rules": rules, "parked": self._parked.rows().num_rows}
        self._summary.put(pa.table({name: pa.array([value], pa.int64()) for name, value in row.items()}))


def _ends(h1: Any, h2: Any, low: Any, order: Any) -> Any:
    """For each version the last time at which it holds: just before a later version of its rule begins."""
    last = np.full(len(low), MAX_TIME)
    for row, later in zip(order[-2::-1], order[:0:-1], strict=True):
        if h1[row] == h1[later] and h2[row] == h2[later]:
            last[row] = min(int(low[later]) - 1, int(last[later]))
    return last


def _whole(values: pa.ChunkedArray) -> pa.Array:
    found = values.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)
