"""Windows on a stream: tumbling, hopping and session in SQL, as DuckDB gives them for the whole topic; by event and by processing time."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import duckdb
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from tests.processing.time.test_event_time import LATENESS_S, NOON, SCHEMA, fill, told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def tumbling(clicks: DataFrame) -> DataFrame:
    return clicks.sparkSession.sql(
        "SELECT window.start AS begin, who, count(*) AS n FROM {clicks} GROUP BY window(at, '10 seconds'), who",
        clicks=clicks,
    )


def hopping(clicks: DataFrame) -> DataFrame:
    return clicks.sparkSession.sql(
        "SELECT window.start AS begin, who, count(*) AS n FROM {clicks} GROUP BY window(at, '10 seconds', '5 seconds'), who",
        clicks=clicks,
    )


def session(clicks: DataFrame) -> DataFrame:
    return clicks.sparkSession.sql(
        "SELECT session_window.start AS begin, who, count(*) AS n FROM {clicks} GROUP BY session_window(at, '3 seconds'), who",
        clicks=clicks,
    )


ORACLE = {
    "tumbling": """
        SELECT time_bucket(INTERVAL 10 SECONDS, t) AS b, who, count(*) FROM clicks
        GROUP BY b, who HAVING b + INTERVAL 10 SECONDS <= $watermark""",
    "hopping": """
        SELECT time_bucket(INTERVAL 5 SECONDS, t) - INTERVAL 5 SECONDS * back AS b, who, count(*)
        FROM clicks, (VALUES (0), (1)) AS hops(back)
        GROUP BY b, who HAVING b + INTERVAL 10 SECONDS <= $watermark""",
    "session": """
        WITH gaps AS (SELECT *, coalesce(t - lag(t) OVER w > INTERVAL 3 SECONDS, true) AS is_first FROM clicks
                      WINDOW w AS (PARTITION BY who ORDER BY t)),
             numbered AS (SELECT *, sum(is_first::INT) OVER (PARTITION BY who ORDER BY t) AS number FROM gaps)
        SELECT min(t) AS b, who, count(*) FROM numbered GROUP BY who, number
        HAVING max(t) + INTERVAL 3 SECONDS <= $watermark""",
}


@pytest.mark.covers("Azure Stream Analytics")
def test_windows_in_sql(spark: SparkSession, tmp_path: Path) -> None:
    """Each kind in one application; what comes too late is left out and counted, as its policy says."""
    url = str(tmp_path / "log")
    with hw.open_log(url) as log:
        fill(log, seed=11)
        late, watermark = told(log, "clicks")
        app = hw.App("windows", log=url, spark=spark)
        clicks = app.topic(
            "clicks", schema=SCHEMA, key="who", time="at", lateness=f"{LATENESS_S} seconds", partitions=3
        )
        for kind in (tumbling, hopping, session):
            app.stream(clicks, late="drop")(kind)
        status = app.run(available_now=True)
        assert late and {stage.late for stage in status.stages} == {len(late)}
        given = log.read("clicks", columns=["id", "who", "at"])
        with duckdb.connect() as database:
            database.execute("SET TimeZone = 'UTC'")
            database.register("given", given)
            ids = ", ".join(map(str, late))
            database.execute(f'CREATE TABLE clicks AS SELECT id, who, "at" AS t FROM given WHERE id NOT IN ({ids})')
            for kind, question in ORACLE.items():
                expected = database.execute(question, {"watermark": watermark}).fetchall()
                found = [(row["begin"], row["who"], row["n"]) for row in log.read(kind).to_pylist()]
                assert sorted(found) == sorted(expected) and len(found) > 10, kind


def by_event(clicks: DataFrame) -> DataFrame:
    return clicks.groupBy(F.window("at", "30 seconds").alias("w")).count().select("w.start", "count")


def by_arrival(clicks: DataFrame) -> DataFrame:
    return clicks.groupBy(F.window("_appended", "30 seconds").alias("w")).count().select("w.start", "count")


@pytest.mark.covers("concept: event time or processing time")
def test_an_outage_is_a_spike_by_processing_time_only(spark: SparkSession, tmp_path: Path) -> None:
    """A click each second for two minutes; those of the second half minute and the third arrive together, when the line is up again."""
    url, now = str(tmp_path / "log"), NOON
    with hw.open_log(url, clock=lambda: int(now.timestamp() * 1_000_000)) as log:
        log.create_topic("clicks", SCHEMA, key="who", time="at", lateness="2 minutes")
        for second in range(120):
            now = NOON + timedelta(seconds=90 if 30 <= second < 90 else second)
            log.append("clicks", [{"id": second, "who": f"w{second % 5}", "at": NOON + timedelta(seconds=second)}])
        app = hw.App("outage", log=url, spark=spark)
        clicks = app.topic("clicks")
        app.view(clicks, key="start")(by_event)
        app.view(clicks, key="start", log_columns=["_appended"])(by_arrival)
        app.run(available_now=True)
        found = {}
        for name in ("by_event", "by_arrival"):
            with app.views[name] as view:
                rows = view.rows(order="start").to_pylist()
                found[name] = [((row["start"] - NOON) // timedelta(seconds=30), row["count"]) for row in rows]
        assert found == {"by_event": [(0, 30), (1, 30), (2, 30), (3, 30)], "by_arrival": [(0, 30), (3, 90)]}
