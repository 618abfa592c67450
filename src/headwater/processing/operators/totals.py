"""`hw.totals`: running aggregates of each group, kept up to date.

What it gives are changes of a table whose key is the group: a row for each group whose aggregates are others than before the batch. Sums of
integers and decimals are exact. With `key=` the input is changes of a table: a row takes back what the earlier one of its key had added
(see `signed_rows`), and a group without rows is given with `_deleted`.

A distinct count needs to know which values were there: of each, two hashes of group, aggregate and value are made in Spark's JVM, so
that the values themselves need not come here. Together they have 128 bits, as keys have.

State: `totals`, the sums of each group; `seen`, the hashes of values, and with `key=` how many rows have each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headwater.model.errors import InvalidInput
from headwater.model.schema import DELETED
from headwater.processing.operators.aggregate import Aggregate, Wanted, aggregates_of
from headwater.processing.operators.operator import Input, Time, hashed_parts, hashes, operate
from headwater.processing.operators.signed_rows import SIGN, check_facts, signed
from headwater.processing.operators.sql import ask
from headwater.processing.operators.sums import GroupedRows, aggregated
from headwater.processing.spark.types import to_arrow
from headwater.processing.state.sorted_runs import H1, H2, Keys, column
from headwater.processing.state.state import OWNER, State, TableSpec

KINDS = ("count", "sum", "avg", "min", "max", "distinct")
_TOTALS, _SEEN, _COUNT = "totals", "seen", "n"


def totals(
    df: DataFrame,
    by: str | Sequence[str],
    *,
    key: str | Sequence[str] | None = None,
    at: str | None = None,
    uid: str | None = None,
    **wanted: Wanted,
) -> DataFrame:
    """The aggregates of each group `by` over all rows so far: one row for each group that a batch changes.

    hw.totals(bids, by="day", n="count", people=("distinct", "bidder"), turnover=("sum", "price"))

    With `key`, rows are changes of a table with that key: a row replaces the earlier one of its key, the later by `at` if that is given.
    """
    group, schema = [by] if isinstance(by, str) else list(by), to_arrow(df.schema)
    aggregates = aggregates_of(wanted, schema, taken=[*group, DELETED.name], kinds=KINDS)
    if key is None:
        check_facts(df, at=at)
    else:
        _check_retractable(aggregates, schema)
        df = signed(df, key, at=at, uid=uid)
    prepared = _prepared(df, group, aggregates)
    operator = Totals([schema.field(name) for name in group], aggregates, schema, is_signed=key is not None)
    return operate(operator, [Input(prepared, [f"b{number}" for number in range(len(group))])], uid=uid)


class Totals:
    """The operator. Its input has the group as `b0` …, the used columns as `v0` …, hashes for the n-th distinct count, and a sign."""

    name = "totals"
    is_prompt = True

    def __init__(
        self, group: Sequence[pa.Field], aggregates: Sequence[Aggregate], schema: pa.Schema, *, is_signed: bool
    ) -> None:
        self.settings = (tuple(field.name for field in group), tuple(aggregates), is_signed)
        deleted = [DELETED] if is_signed else []
        self.schema = pa.schema([*group, *(pa.field(each.name, each.type) for each in aggregates), *deleted])
        self._group, self._aggregates, self._is_signed = [field.name for field in group], aggregates, is_signed
        self._used = used_columns(aggregates)
        self._distinct = sum(each.kind == "distinct" for each in aggregates)
        self._sums = [
            _Sums(number, schema.field(name).type, {each.kind for each in aggregates if each.column == name})
            for number, name in enumerate(self._used)
        ]
        fields = [pa.field("rows", pa.int64()), *(field for sums in self._sums for field in sums.fields)]
        self._fields = fields + [pa.field(f"d{number}", pa.int64()) for number in range(self._distinct)]
        seen = [pa.field(OWNER, pa.int64()), pa.field(_COUNT, pa.int64())]
        self.tables = {_TOTALS: TableSpec("keyed", self._fields), _SEEN: TableSpec("keyed", seen)}

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The groups that changed."""
        rows = inputs[0]
        if not rows.num_rows:
            return self.schema.empty_table()
        keys = Keys.of(rows)
        sign = column(rows, SIGN) if self._is_signed else None
        found, number = state[_TOTALS].find(keys)
        known = pa.table({"k": pa.array(number), **{field.name: found.column(field.name) for field in self._fields}})
        values = [rows.column(f"v{at}") for at in range(len(self._used))]
        given = GroupedRows(keys, sign, values, self._first_seen(state, rows, keys, sign))
        now = aggregated(given, known, self._fields, self._aggregates, self._used)
        if now is None:
            now = self._asked(given, known)
        own = {field.name: now.column(field.name) for field in self._fields}
        is_gone = column(now, "rows") == 0
        put = pa.table({H1: pa.array(keys.h1), H2: pa.array(keys.h2), **own})
        state[_TOTALS].put(put.filter(pa.array(~is_gone)))
        state[_TOTALS].remove(keys.only(is_gone))
        columns = {name: rows.column(f"b{at}").take(pa.array(keys.one)) for at, name in enumerate(self._group)}
        columns |= {each.name: now.column(f"a{at}") for at, each in enumerate(self._aggregates)}
        columns |= {DELETED.name: pa.array(is_gone)} if self._is_signed else {}
        return pa.table(columns).filter(now.column("changed"))

    def _first_seen(self, state: State, rows: pa.Table, keys: Keys, sign: Any) -> Any:
        """By how much each distinct count of each group grows or shrinks."""
        gained = np.zeros((len(keys), self._distinct), np.int64)
        for number in range(self._distinct):
            hashed = {H1: rows.column(f"d{number}_1"), H2: rows.column(f"d{number}_2"), OWNER: rows.column(H1)}
            is_value = hashed[H1].is_valid().to_numpy()
            values = pa.table(hashed).filter(pa.array(is_value))
            signs = None if sign is None else sign[is_value]
            self._count_seen(state, values, keys.row[is_value], signs, gained[:, number])
        return gained

    def _count_seen(self, state: State, values: pa.Table, group: Any, sign: Any, gained: Any) -> None:
        if not values.num_rows:
            return
        keys = Keys.of(values)
        found, number = state[_SEEN].find(keys)
        before = np.zeros(len(keys), np.int64)
        before[number] = column(found, _COUNT)
        after = before.copy()
        if sign is not None:
            np.add.at(after, keys.row, sign)
        else:
            after[:] = 1  # that a value was there is enough where nothing is taken back
        np.add.at(gained, group[keys.one], (after > 0).astype(np.int64) - (before > 0))
        owner = values.column(OWNER).take(pa.array(keys.one))
        put = pa.table({H1: pa.array(keys.h1), H2: pa.array(keys.h2), OWNER: owner, _COUNT: pa.array(after)})
        state[_SEEN].put(put.filter(pa.array((after != before) & (after > 0))))
        state[_SEEN].remove(keys.only((after <= 0) & (before > 0)))

    def _asked(self, brought: GroupedRows, known: pa.Table) -> pa.Table:
        """For each group, in order: the new sums, the aggregates `a0` …, and whether they are others than before; by SQL."""
        import duckdb

        keys, sign = brought.keys, np.ones(len(brought.keys.row), np.int64) if brought.sign is None else brought.sign
        values = {f"v{at}": each for at, each in enumerate(brought.columns)}
        given = pa.table({"k": pa.array(keys.row), "sign": pa.array(sign), **values})
        gained = {f"d{number}": pa.array(brought.gained[:, number]) for number in range(self._distinct)}
        seen = pa.table({"k": pa.array(np.arange(len(keys))), **gained})
        fresh = ", ".join(["k", "sign as rows", *(part for sums in self._sums for part in sums.of_a_row)])
        summed = [
            "sum(rows)::bigint as rows",
            *(part for sums in self._sums for part in sums.of_all),
            *(f"sum(d{number})::bigint as d{number}" for number in range(self._distinct)),
        ]
        results = self._results()
        differs = " or ".join(f"now.a{at} is distinct from before.a{at}" for at in range(len(results)))
        shown = ", ".join(f"{sql} as a{at}" for at, sql in enumerate(results))
        sql = f"""
            with united as (select {fresh} from given union all by name from known union all by name from seen),
            now as (select *, {shown} from (select k, {", ".join(summed)} from united group by k)),
            before as (select *, {shown} from known)
            select now.*, case when before.k is null then now.rows > 0 else {differs} end as changed
            from now left join before using (k) order by k"""
        try:
            return ask(sql, given=given, known=known, seen=seen)
        except (duckdb.ConversionException, duckdb.OutOfRangeException) as error:
            raise InvalidInput(
                f"A sum no longer fits into its column: {str(error).splitlines()[0]}.",
                advice="Cast the column that is summed to DECIMAL(38, 0) first.",
            ) from None

    def _results(self) -> list[str]:
        """The aggregates in SQL, over the sums."""
        found, distinct = [], 0
        for each in self._aggregates:
            if each.kind == "distinct":
                found.append(f"coalesce(d{distinct}, 0)")
                distinct += 1
            elif each.column is None:
                found.append("rows")
            else:
                found.append(self._sums[self._used.index(each.column)].result(each))
        return found


class _Sums:
    """What is kept of a column, in SQL: how many values, and as far as it is asked for their sum, the least and the greatest.

    Integers and decimals are summed in 38 digits.
    """

    def __init__(self, number: int, kind: pa.DataType, asked: set[str]) -> None:
        self._at = number
        sums, self._sql = pa.float64(), "double"
        if not pa.types.is_floating(kind):
            scale = kind.scale if pa.types.is_decimal(kind) else 0
            sums, self._sql = pa.decimal128(38, scale), f"decimal(38, {scale})"
        self._has_sum = bool(asked & {"sum", "avg"})
        self._ends = [end for end in ("min", "max") if end in asked]
        self.fields = [pa.field(f"n{number}", pa.int64()), *([pa.field(f"s{number}", sums)] if self._has_sum else [])]
        self.fields += [pa.field(f"{end}{number}", kind) for end in self._ends]

    @property
    def of_a_row(self) -> list[str]:
        value = f"v{self._at}"
        parts = [f"case when {value} is null then 0 else sign end as n{self._at}"]
        if self._has_sum:
            own = f"{value}::{self._sql}"
            parts.append(f"case when sign < 0 then -{own} else {own} end as s{self._at}")
        return parts + [f"{value} as {end}{self._at}" for end in self._ends]

    @property
    def of_all(self) -> list[str]:
        parts = [f"sum(n{self._at})::bigint as n{self._at}"]
        if self._has_sum:
            parts.append(f"coalesce(sum(s{self._at}), 0)::{self._sql} as s{self._at}")
        return parts + [f"{end}({end}{self._at}) as {end}{self._at}" for end in self._ends]

    def result(self, each: Aggregate) -> str:
        at = self._at
        match each.kind:
            case "count":
                return f"n{at}"
            case "sum":
                whole = "::bigint" if pa.types.is_integer(each.type) else ""
                return f"case when n{at} > 0 then s{at}{whole} end"
            case "avg":
                return f"case when n{at} > 0 then s{at}::double / n{at} end"
            case _:
                return f"{each.kind}{at}"


def used_columns(aggregates: Sequence[Aggregate]) -> list[str]:
    """The columns whose values are needed; of those that are counted as distinct only hashes are."""
    return sorted({each.column for each in aggregates if each.column is not None and each.kind != "distinct"})


def _prepared(df: DataFrame, group: Sequence[str], aggregates: Sequence[Aggregate]) -> DataFrame:
    """What the operator needs of the rows."""
    parts = hashed_parts(df, group)
    columns: list[Column] = [F.col(f"`{name}`").alias(f"b{number}") for number, name in enumerate(group)]
    columns += [F.col(f"`{name}`").alias(f"v{number}") for number, name in enumerate(used_columns(aggregates))]
    distinct = [each.column for each in aggregates if each.kind == "distinct"]
    for number, name in enumerate(distinct):
        assert name is not None
        own = hashes([*parts, F.lit(number), *hashed_parts(df, [name])])
        for place, value in enumerate(own, 1):
            columns.append(F.when(F.col(f"`{name}`").isNotNull(), value).alias(f"d{number}_{place}"))
    return df.select(*columns, *([F.col(SIGN)] if SIGN in df.columns else []))


def _check_retractable(aggregates: Sequence[Aggregate], schema: pa.Schema) -> None:
    """Refuses what cannot take rows back: the greatest is forgotten when it goes, and sums of DOUBLE drift."""
    for each in aggregates:
        if each.kind in ("min", "max"):
            raise InvalidInput(
                f"{each.name}: a row that is removed takes its {each.kind} with it, and the next one was not kept.",
                advice=f"Use hw.top_n(…, 1, key=…) for the {each.kind} of a table that changes.",
            )
        if each.kind in ("sum", "avg") and pa.types.is_floating(schema.field(each.column).type):
            raise InvalidInput(
                f"{each.name}: column {each.column!r} is DOUBLE, whose sums drift when rows are taken back.",
                advice="Cast it to DECIMAL first.",
            )
