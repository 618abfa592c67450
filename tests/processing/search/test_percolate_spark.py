"""`hw.percolate` on Spark: over rows, and in an application that is killed while searches change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.processing.graph.table import Table
from headwater.testing import CRASH, AppTest, transform
from tests.rigs.processing.searches import random_document, random_search

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATENESS_S = 20
ADS = "id BIGINT, title STRING, body STRING, category STRING, price BIGINT, area DOUBLE, sold BOOLEAN, at TIMESTAMP, lat DOUBLE, lon DOUBLE"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def alerts(ads: DataFrame, searches: Table) -> DataFrame:
    found = hw.percolate(ads, searches, ["title", "body"], at="at", places={"home": ("lat", "lon")})
    return found.select("id", "search", "owner", "at")


def make() -> hw.App:
    app = hw.App("alerts", state_partitions=8, idle="1 hour")
    ads = app.topic("ads", schema=ADS, key="id", time="at", lateness=f"{LATENESS_S} seconds", partitions=2)
    searches = app.table(
        "searches",
        "search STRING, query STRING, owner STRING, changed TIMESTAMP",
        key="search",
        time="changed",
        partitions=2,
    )
    app.stream(ads, searches, to="alerts", key="id")(alerts)
    return app


def test_every_partition_of_the_state_has_every_search(spark: SparkSession) -> None:
    """A search that all documents match finds all of them, wherever each was sent."""
    ads = spark.createDataFrame(
        [(number, "a flat", NOON) for number in range(200)], "id BIGINT, title STRING, at TIMESTAMP"
    )
    searches = spark.createDataFrame([("s", "flat", NOON)], "search STRING, query STRING, changed TIMESTAMP")
    found = hw.percolate(ads, searches, ["title"], at="at", searches_at="changed")
    assert sorted(row["id"] for row in found.select("id").collect()) == list(range(200))


@pytest.mark.covers("Elasticsearch percolator")
def test_alerts_are_those_of_the_searches_at_the_time_of_each_ad() -> None:
    """Searches change and are broken while ads flow, and the application is killed twice."""
    random = Random(3)
    ads = [{**random_document(random), "id": at, "at": NOON + timedelta(seconds=at)} for at in range(120)]
    versions = []
    for number in range(60):
        search = None if number % 9 == 4 else random_search(random, 1)
        versions.append((NOON + timedelta(seconds=2 * number), f"s{random.randrange(25)}", search, f"o{number}"))
    feed: list[dict[str, Any]] = sorted(
        ads, key=lambda row: row["at"] + timedelta(seconds=random.uniform(0, LATENESS_S))
    )
    with AppTest(make) as test:
        for start in range(0, 120, 40):
            changed = versions[start // 2 : start // 2 + 20]
            test.feed("searches", [
                {"search": name, "query": '"broken' if search is None else search.text, "owner": owner, "changed": at}
                for at, name, search, owner in changed
            ])  # fmt: skip
            test.feed("ads", [*feed[start : start + 40], *([CRASH] if start < 80 else [])])
        test.run()
        given = test.read("alerts")
        reached = [
            max(row[at] for row in rows if row["_partition"] == partition) - timedelta(seconds=lateness)
            for topic, at, lateness in (("ads", "at", LATENESS_S), ("searches", "changed", 0))
            for rows in [test.log.read(topic, columns=[at, "_partition"]).to_pylist()]
            for partition in range(2)
        ]
    found = [(row["id"], row["search"], row["owner"]) for row in given]
    expected = set()
    for ad in ads:
        known = {name: (search, owner) for at, name, search, owner in versions if at <= ad["at"]}
        expected |= {(ad["id"], name, owner) for name, (search, owner) in known.items() if search and search.holds(ad)}
    expected = {each for each in expected if ads[each[0]]["at"] < min(reached)}
    assert len(found) == len(set(found))
    assert set(found) == expected and len(expected) > 100


def rows_alerts(ads: DataFrame, searches: DataFrame) -> DataFrame:
    return hw.percolate(ads, searches, "title", at="at", searches_at="changed").select("title", "search")


def test_over_rows_it_gives_the_same_at_once() -> None:
    ads = [{"title": title, "at": NOON} for title in ("Red bicycle", "red car", "Blue bicycle")]
    searches = [
        {"search": name, "query": query, "changed": NOON}
        for name, query in (("both", "red AND bicycle"), ("any", "red blue"), ("none", "green"), ("bad", '"'))
    ]
    found = transform(rows_alerts, ads=ads, searches=searches)
    assert sorted((row["search"], row["title"]) for row in found) == [
        ("any", "Blue bicycle"), ("any", "Red bicycle"), ("any", "red car"), ("both", "Red bicycle")
    ]  # fmt: skip
