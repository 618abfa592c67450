"""Windows in SQL on a stream: tumbling, hopping and session, over shuffled and late events, as DuckDB gives them for the whole topic."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from test_event_time import LATENESS_S, SCHEMA, fill, told

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
