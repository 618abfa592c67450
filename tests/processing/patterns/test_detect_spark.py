"""`hw.detect` in applications on Spark: inside the source of its topic and behind a shuffle, batch by batch."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.model.errors import HeadwaterError
from headwater.testing import transform

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
SCHEMA = "card STRING NOT NULL, shop INT, amount BIGINT, at TIMESTAMP"
END = 10_000


def strikes(payments: DataFrame) -> DataFrame:
    """Small payments, then a large one: by the topic's key."""
    return hw.detect(
        payments,
        """
        PARTITION BY card ORDER BY at, amount
        MEASURES FIRST(probe.at) AS began, strike.amount - AVG(probe.amount) AS more, upper(CLASSIFIER()) AS last
        PATTERN (probe{2,} strike) WITHIN INTERVAL '2' MINUTE
        DEFINE probe AS amount < 30, strike AS amount > 70
        """,
    )


def pairs(payments: DataFrame) -> DataFrame:
    """Every A, then B within a time: by another key."""
    return hw.detect(
        payments,
        """
        PARTITION BY shop ORDER BY at, amount
        MEASURES a.amount AS first, b.amount AS second
        AFTER MATCH SKIP TO NEXT ROW
        PATTERN (a other*? b) WITHIN INTERVAL '1' MINUTE
        DEFINE a AS amount > 90, b AS amount < a.amount - 85
        """,
    )


def counted(payments: DataFrame) -> DataFrame:
    """Windows of what was found: the time of results passes through."""
    return hw.windowed(strikes(payments), over="5 minutes", at="matched_at", n="count")


def row(card: int, shop: int, amount: int, second: int) -> dict[str, Any]:
    return {"card": f"c{card}", "shop": shop, "amount": amount, "at": NOON + timedelta(seconds=second)}


def random_payments(random: Random, count: int) -> list[dict[str, Any]]:
    rows = [row(random.randrange(8), random.randrange(3), random.randrange(100), 3 * n) for n in range(count)]
    return sorted(rows, key=lambda each: each["at"] + timedelta(seconds=random.randrange(30)))


def make(folder: Path, spark: SparkSession) -> hw.App:
    app = hw.App("cards", log=str(folder / "log"), spark=spark, state_partitions=2)
    payments = app.topic("payments", schema=SCHEMA, key="card", time="at", lateness="1 minute", partitions=2)
    app.stream(payments, to="strikes", key="card", time="matched_at")(strikes)
    app.stream(payments, to="pairs", key="shop", time="matched_at")(pairs)
    app.stream(payments, to="counted")(counted)
    return app


def shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(each.values()) for each in rows)


@pytest.mark.covers("Esper")
@pytest.mark.covers("Flink")
def test_batches_give_what_all_rows_at_once_give(tmp_path: Path, spark: SparkSession) -> None:
    """Fused into the source, behind a shuffle, and with an operator after it."""
    random, app = Random(5), make(tmp_path, spark)
    plan = app.plan()
    assert plan.count("detect-1 runs inside the source of payments") == 2, plan
    rows = random_payments(random, 900)
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("payments", SCHEMA, key="card", time="at", lateness="1 minute", partitions=2)
        for start in range(0, 900, 450):
            log.append("payments", rows[start : start + 450])
            app.run(available_now=True)
        log.append("payments", [row(card, 9, 50, END) for card in range(8)])
        app.run(available_now=True)
        for name, function in (("strikes", strikes), ("pairs", pairs), ("counted", counted)):
            wanted = transform(function, payments=rows)
            assert wanted, name
            assert shown(log.read(name).to_pylist()) == shown(wanted), name


def test_what_is_no_stream_of_events_is_refused(spark: SparkSession) -> None:
    """A table that changes has rows that are replaced; and the place of an error is in its text."""
    rows = spark.createDataFrame([("a", 1, NOON)], "k STRING, x INT, at TIMESTAMP")
    with pytest.raises(HeadwaterError, match="a table that changes"):
        hw.detect(rows.withColumn("_deleted", F.lit(False)), "ORDER BY at PATTERN (a)")
    with pytest.raises(HeadwaterError, match=r"There is no column z.*line 2, column 13"):
        hw.detect(rows, "ORDER BY at PATTERN (a)\nDEFINE a AS z > 1")
    with pytest.raises(HeadwaterError, match="a pattern or steps"):
        hw.detect(rows)


def test_what_the_expression_language_lacks_is_computed_by_spark(spark: SparkSession) -> None:
    """Values and conditions of a row may use any function of Spark, also under PREV and in aggregates."""
    words = [{"w": word, "at": NOON + timedelta(seconds=n)} for n, word in enumerate(["cat", "cut", "dog", "dig", "x"])]

    def near(words: DataFrame) -> DataFrame:
        return hw.detect(
            words,
            """
            ORDER BY at MEASURES SUM(levenshtein(b.w, 'cat')) AS far, PREV(soundex(b.w)) AS before
            PATTERN (a b) DEFINE a AS levenshtein(w, 'cat') < 3, b AS levenshtein(w, 'dog') < 3
            """,
        )

    assert [(each["far"], each["before"]) for each in transform(near, words=words)] == [(3, "C300")]
