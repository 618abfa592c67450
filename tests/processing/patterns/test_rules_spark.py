"""Rules of `hw.detect` on Spark: over rows, and in an application that is killed while rules change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.model.errors import HeadwaterError
from headwater.processing.graph.table import Table
from headwater.testing import CRASH, AppTest, transform
from tests.processing.patterns.test_rules import SECOND, Change, by_hand, change, random_change, shown

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATENESS_S, EVENTS, LAST, END = 20, 240, 250, 100_000
MEASURES = {f"m{number}": "STRING" for number in range(4)}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def moment(second: float) -> datetime:
    return NOON + timedelta(seconds=second)


def alerts(payments: DataFrame, rules: Table) -> DataFrame:
    return hw.detect(payments, key="k", rules=rules, **MEASURES)


def make() -> hw.App:
    app = hw.App("cards", state_partitions=4, idle="1 hour")
    payments = app.topic(
        "payments", schema="k STRING, n BIGINT, x BIGINT, at TIMESTAMP", key="k", time="at",
        lateness=f"{LATENESS_S} seconds", partitions=2,
    )  # fmt: skip
    rules = app.table(
        "rules",
        "rule STRING, pattern STRING, owner STRING, changed TIMESTAMP",
        key="rule",
        time="changed",
        partitions=2,
    )
    app.stream(payments, rules, to="alerts", key="k", time="matched_at")(alerts)
    return app


def rule_row(each: Change) -> dict[str, Any]:
    row = {name: value for name, value in each.row.items() if name != "_deleted"}
    return {**row, "changed": moment(row["changed"] / SECOND)}


def payment(key: str, n: int, x: int | None, second: int) -> dict[str, Any]:
    return {"k": key, "n": n, "x": x, "at": moment(second)}


@pytest.mark.covers("Esper")
def test_matches_are_those_of_the_rules_at_the_time_of_their_rows() -> None:
    """Rules are added, changed and parked while the stream runs, and the application is killed twice."""
    random = Random(11)
    rows: list[dict[str, Any]] = [
        {"k": random.choice("pqr"), "n": n, "x": random.randrange(7), "at": n * SECOND} for n in range(EVENTS)
    ]
    changes = sorted((random_change(random, n, 12, EVENTS) for n in range(60)), key=lambda each: each.row["changed"])
    changes += [Change(change(rule, LAST * SECOND, "closed"), None) for rule in {each.row["rule"] for each in changes}]
    sent = sorted(rows, key=lambda row: row["at"] + random.uniform(0, LATENESS_S) * SECOND)
    feed = [payment(row["k"], row["n"], row["x"], row["at"] // SECOND) for row in sent]
    third = EVENTS // 3
    with AppTest(make) as test:
        for start in range(0, EVENTS, third):
            is_last = start + third == EVENTS
            until = END if is_last else start + third
            part = [each for each in changes if start <= each.row["changed"] // SECOND < until]
            test.feed("rules", [rule_row(each) for each in part])
            test.feed("payments", [*feed[start : start + third], *([] if is_last else [CRASH])])
        test.feed("rules", [rule_row(Change(change(f"end{n}", END * SECOND, "end"), None)) for n in range(8)])
        test.feed("payments", [payment(f"end{n}", n, None, END) for n in range(8)])
        test.run()
        given = test.read("alerts")
    wanted = by_hand(rows, changes, is_rule_first=True)
    assert sorted(shown(given), key=repr) == sorted(wanted, key=repr)
    assert len(wanted) > 100 and len({row["rule"] for row in given}) > 5


def probes(payments: DataFrame, rules: DataFrame) -> DataFrame:
    return hw.detect(payments, key="k", rules=rules, n="INT", seen="TIMESTAMP")


def test_over_rows_it_gives_the_same_at_once() -> None:
    """Every partition has every rule, and a measure that a rule lacks is null."""
    rows = [payment(f"k{at % 50}", at, at % 7, at) for at in range(200)]
    rules = [
        {"rule": "large", "pattern": "MEASURES a.n AS n, a.at AS seen PATTERN (a) DEFINE a AS x > 5", "changed": moment(100)},
        {"rule": "any", "pattern": "MEASURES a.n AS other PATTERN (a)", "changed": moment(0)},
        {"rule": "bad", "pattern": "PATTERN (", "changed": moment(0)},
    ]  # fmt: skip
    found = transform(probes, payments=rows, rules=rules)
    large = [(row["n"], row["seen"]) for row in found if row["rule"] == "large"]
    assert sorted(large) == [(at, moment(at)) for at in range(100, 200) if at % 7 == 6]
    assert [row["n"] for row in found if row["rule"] == "any"] == [None] * 200
    assert len(found) == 200 + len(large)


def test_what_does_not_fit_together_is_refused(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("a", 1, NOON)], "k STRING, x INT, at TIMESTAMP")
    rules = spark.createDataFrame([("r", "PATTERN (a)", NOON)], "rule STRING, pattern STRING, changed TIMESTAMP")
    with pytest.raises(HeadwaterError, match="or rules"):
        hw.detect(rows, "ORDER BY at PATTERN (a)", rules=rules)
    with pytest.raises(HeadwaterError, match="WITHIN in the rules"):
        hw.detect(rows, key="k", rules=rules, within="1 minute")
    with pytest.raises(HeadwaterError, match="no STRING column 'pattern'"):
        hw.detect(rows, key="k", rules=rules.drop("pattern"))
    with pytest.raises(HeadwaterError, match="'card' does not exist"):
        hw.detect(rows, key="card", rules=rules)
    with pytest.raises(HeadwaterError, match="two columns 'k'"):
        hw.detect(rows, key="k", rules=rules, K="INT")
    with pytest.raises(HeadwaterError, match="ties"):
        hw.detect(rows, key="k", rules=rules, ties="rule")  # type: ignore[arg-type]
    with pytest.raises(HeadwaterError, match="WHOLE"):
        hw.detect(rows, key="k", rules=rules, m="WHOLE")
