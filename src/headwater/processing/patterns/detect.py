"""`hw.detect`: row patterns in events, as SQL's MATCH_RECOGNIZE has them, or rules that are rows of a table; `hw.step`: a step.

On a stream a match is given as soon as no row to come can change it. On a DataFrame that is no stream the whole answer is given at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, TimestampType

from headwater.model.clock import Duration, duration_us
from headwater.model.errors import InvalidInput, Unsupported
from headwater.model.schema import DELETED, to_arrow_schema
from headwater.processing.graph.table import Table
from headwater.processing.operators.copies import copied
from headwater.processing.operators.grouping import keyed
from headwater.processing.operators.operator import Input, in_log_order, operate
from headwater.processing.operators.row_order import time_column
from headwater.processing.patterns.grammar import RowPattern, failure, parse_pattern
from headwater.processing.patterns.operator import MATCHED_AT, TIMED_OUT, Detect
from headwater.processing.patterns.plan import Formulas, formulas_of, has_anchor, plan_of, spark_parts
from headwater.processing.patterns.rule_operator import DetectRules
from headwater.processing.patterns.rule_plan import RuleForm
from headwater.processing.patterns.rule_versions import PATTERN, RULE, RuleSource
from headwater.processing.spark.types import to_arrow

ROWS_MAX = 100_000

Times = int | tuple[int, int | None]
Ties = Literal["table", "event"]


class Step(NamedTuple):
    """Some rows of a pattern, one after the other, that satisfy a condition; or none that does."""

    name: str
    condition: str | None
    times: Times
    absent: bool


def step(name: str, condition: str | None = None, *, times: Times = 1, absent: bool = False) -> Step:
    """A step of a pattern: `times` rows that satisfy a condition in Spark SQL, or from `times[0]` to `times[1]` of them (None: no bound).

    With `absent=True` it is any number of rows of which none satisfies the condition.
    """
    if not name.isidentifier():
        raise InvalidInput(f"{name!r} is not the name of a step.", advice="Use letters, digits and underscores.")
    least, most = (times, times) if isinstance(times, int) else times
    if least < 0 or (most is not None and (most < 1 or most < least)):
        raise InvalidInput(f"times={times!r} allows no repetition.", advice="Use a number, or (least, most).")
    if absent and (condition is None or times != 1):
        raise InvalidInput("A step that is absent has a condition and no times.", advice="Remove times=, or absent=.")
    return Step(name, condition, times, absent)


def detect(
    events: DataFrame,
    pattern: str | None = None,
    *,
    key: str | Sequence[str] = (),
    at: str | None = None,
    within: Duration | None = None,
    steps: Sequence[Step] = (),
    rules: Table | DataFrame | None = None,
    rules_at: str | None = None,
    ties: Ties = "table",
    timeouts: bool = False,
    rows_max: int = ROWS_MAX,
    uid: str | None = None,
    **measures: str,
) -> DataFrame:
    """The matches of a row pattern in events: a text in the form of MATCH_RECOGNIZE, steps, or rules of a table.

    hw.detect(bids, "PARTITION BY card ORDER BY at MEASURES … PATTERN (probe{3} strike) WITHIN '10 minutes' DEFINE …")
    hw.detect(bids, key="card", within="10 minutes", steps=[hw.step("probe", "amount < 2", times=3),
              hw.step("strike", "amount > 500")], amount="strike.amount")
    hw.detect(bids, key="card", rules=rules, amount="BIGINT")

    `rules` is a table of the application, or a DataFrame of its changes, with the columns `rule` (the key) and `pattern`, a text without
    PARTITION BY and ORDER BY. A rule holds for matches whose rows lie after its time, and before that of its next version or removal. At
    equal times the change of the rule comes first (`ties="table"`), or the event does (`ties="event"`). With rules the further arguments
    are the measures that they have in common, with their SQL types.

    With `timeouts=True` the result also has what was not complete when WITHIN was over; its column `timed_out` says so.
    """
    if isinstance(events, Table) or DELETED.name in events.columns:
        raise Unsupported("hw.detect needs events, and this is a table that changes.", advice="Use the topic's events.")
    if (pattern is not None) + bool(steps) + (rules is not None) != 1:
        raise InvalidInput("hw.detect needs a pattern or steps, or rules.", advice="Give one of them.")
    if rows_max < 1:
        raise InvalidInput(f"rows_max={rows_max} allows no match.", advice="Use a number above zero.")
    if rules is not None:
        if within or timeouts:
            raise InvalidInput(
                "within= and timeouts= do not apply to rules.", advice="Write WITHIN in the rules' texts."
            )
        names = [key] if isinstance(key, str) else list(key)
        return _detected_by_rules(events, rules, names, at, rules_at, ties, rows_max, uid, measures)
    if pattern is None:
        names = [key] if isinstance(key, str) else list(key)
        pattern = _text(names, time_column(events, at), within, steps, measures)
    elif key or at or within or measures:
        raise InvalidInput("A text has key, time, WITHIN and measures in it.", advice="Write them as clauses.")
    return _detected(events, _spelled(parse_pattern(pattern), events), rows_max, uid, timeouts=timeouts)


def _detected(events: DataFrame, pattern: RowPattern, rows_max: int, uid: str | None, *, timeouts: bool) -> DataFrame:
    if events.isStreaming and has_anchor(pattern, "end"):
        place = pattern.text.find("$")
        raise failure(pattern.text, place, "The partition of a stream never ends, so $ never holds", "Remove $.")
    formulas = formulas_of(pattern, events.columns)
    given = events
    events, key = keyed(events, pattern.key)
    parts = spark_parts(pattern, formulas, to_arrow(given.schema))
    columns = dict.fromkeys([*key, *(each.column for each in pattern.order), *_used(formulas, given.columns)])
    if pattern.rows == "all":
        columns |= dict.fromkeys(given.columns)
    rows = events.select(
        *(F.col(_quoted(name)) for name in columns), *(F.expr(sql).alias(name) for name, sql in parts.items())
    )  # fmt: skip
    plan = plan_of(
        pattern, formulas, to_arrow(rows.schema), parts, rows_max=rows_max, in_log_order=in_log_order(given), timeouts=timeouts
    )  # fmt: skip
    found = operate(Detect(to_arrow(rows.schema), plan), [Input(rows, key)], uid=uid)
    shown = given.columns if pattern.rows == "all" else pattern.key
    results = (F.expr(each.sql).alias(name) for name, each in formulas.measures.items())
    more = [TIMED_OUT] if timeouts else []
    return found.select(*(F.col(_quoted(name)) for name in shown), *results, MATCHED_AT, *more)


def _detected_by_rules(
    events: DataFrame, rules: Table | DataFrame, key: Sequence[str], at: str | None, rules_at: str | None, ties: Ties,
    rows_max: int, uid: str | None, measures: Mapping[str, str],
) -> DataFrame:  # fmt: skip
    if ties not in ("table", "event"):
        raise InvalidInput(f"ties={ties!r} is not a rule for equal times.", advice='Use "table" or "event".')
    changes = rules.versions if isinstance(rules, Table) else rules
    for name in (RULE, PATTERN):
        if name not in changes.columns or not isinstance(changes.schema[name].dataType, StringType):
            raise InvalidInput(
                f"The table of rules has no STRING column {name!r}.",
                advice=f"It needs {RULE!r}, its key, and {PATTERN!r}, the text of a rule. Rename columns with select().",
            )
    missing = [name for name in key if name not in events.columns]
    if missing:
        raise InvalidInput(
            f"The key column {missing[0]!r} does not exist.", advice=f"Columns are {', '.join(events.columns)}."
        )
    schema = to_arrow(events.schema)
    form = RuleForm(schema, tuple(key), time_column(events, at), _declared(measures), rows_max)
    changed = time_column(changes, rules_at)
    own = tuple(field for field in to_arrow(changes.schema) if field.name not in (RULE, PATTERN, changed, DELETED.name))
    source = RuleSource(own, changed, ties == "table", in_log_order(changes), DELETED.name in changes.columns)
    operator = DetectRules(form, source, in_log_order=in_log_order(events))
    rows, by = keyed(events, key)
    return operate(operator, [Input(rows, by), copied(changes)], uid=uid)


def _declared(measures: Mapping[str, str]) -> pa.Schema:
    """The measures that rules have in common; a name that is no column, or a type that is none, is refused."""
    if not measures:
        return pa.schema([])
    return to_arrow_schema(", ".join(f"{_quoted(name)} {type_}" for name, type_ in measures.items()))


def _used(formulas: Formulas, columns: Sequence[str]) -> list[str]:
    """The columns that the terms of formulas read."""
    import sqlglot
    from sqlglot import expressions as sql

    nodes = (sqlglot.parse_one(value, dialect="databricks") for value in formulas.values())
    names = {each.name for node in nodes for each in node.find_all(sql.Column)}
    return [name for name in columns if name in names]


def _spelled(pattern: RowPattern, events: DataFrame) -> RowPattern:
    """The pattern with the names of columns as the events spell them; the first column of ORDER BY is their time."""
    own = {name.lower(): name for name in events.columns}
    for name in [*pattern.key, *(each.column for each in pattern.order)]:
        if name.lower() not in own:
            shown = ", ".join(events.columns)
            place = max(pattern.text.find(name), 0)
            raise failure(pattern.text, place, f"There is no column {name}", f"Columns are {shown}.")
    order = tuple(each._replace(column=own[each.column.lower()]) for each in pattern.order)
    first = order[0]
    if not isinstance(events.schema[first.column].dataType, TimestampType) or first.is_descending:
        place = max(pattern.text.find(pattern.order[0].column), 0)
        advice = "Put the column of event time first, ascending."
        raise failure(pattern.text, place, "ORDER BY begins with the event time", advice)
    time_column(events, first.column)
    return pattern._replace(key=tuple(own[name.lower()] for name in pattern.key), order=order)


def _text(key: Sequence[str], at: str, within: Duration | None, steps: Sequence[Step], measures: dict[str, str]) -> str:
    """The same pattern as a text."""
    clauses = [f"PARTITION BY {', '.join(map(_quoted, key))}"] if key else []
    clauses.append(f"ORDER BY {_quoted(at)}")
    if measures:
        clauses.append("MEASURES " + ", ".join(f"{sql} AS {_quoted(name)}" for name, sql in measures.items()))
    clauses.append(f"PATTERN ({' '.join(map(_part, steps))})")
    if within is not None:
        clauses.append(f"WITHIN {duration_us(within)} us")
    defined = [f"{each.name} AS {each.condition}" for each in steps if each.condition is not None]
    if defined:
        clauses.append(f"DEFINE {', '.join(defined)}")
    return "\n".join(clauses)


def _part(each: Step) -> str:
    if each.absent:
        return f"ABSENT({each.name})"
    least, most = (each.times, each.times) if isinstance(each.times, int) else each.times
    if least == most == 1:
        return each.name
    return f"{each.name}{{{least}}}" if least == most else f"{each.name}{{{least},{'' if most is None else most}}}"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
