"""An application on Kafka for tests that kill things: one script, the events it is fed, and what DuckDB makes of the same events."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

import headwater as hw
from headwater.log.log import Log
from headwater.model.errors import HeadwaterError
from headwater.processing.stages.status import read_status

SCHEMA = "n BIGINT, user_id BIGINT, page STRING, at TIMESTAMP"
PARTITIONS = 3
BROKER = {
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}
"""A broker that was killed is let in again after two seconds instead of nine, and its open transactions are ended soon."""

SCRIPT = f'''\
import os
import sys

import headwater as hw
from pyspark.sql import functions as F

app = hw.App("clickstream", log=os.environ["LOG"], state=os.environ["STATE"], views=os.environ["VIEWS"])
clicks = app.topic("clicks", schema="{SCHEMA}", key="user_id", time="at", partitions={PARTITIONS})


def clean(page):
    return page.partition("?")[0]


@app.stream(clicks, to="visits", key="page", time="at", partitions=2)
def visits(clicks):
    page = F.udf(clean, "string")("page").alias("page")
    return clicks.where("page <> '/health'").select("n", page, "user_id", "at")


@app.view(visits, key="page")
def per_page(visits):
    return visits.groupBy("page").agg(F.count("*").alias("visits"), F.sum("n").alias("total"))


@app.stream(visits, to="busy", key="page", partitions=2)
def busy(visits):
    return hw.totals(visits, by="page", visits="count", total=("sum", "n"))


if __name__ == "__main__":
    last = app.run(available_now="--available-now" in sys.argv)
    print(*(f"{{each.name}}: {{each.state}} {{each.error or ''}}" for each in last.stages), sep="\\n")
'''


class Clicks:
    """The events that were acknowledged, in one place that nobody kills."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.rows: list[dict[str, Any]] = []

    def append(self, log: Log, count: int) -> None:
        """Appends so many more."""
        pages = ["/health", *(f"/{number}" for number in range(12))]
        first = len(self.rows)
        more = [
            {
                "n": n,
                "user_id": self._chance.randrange(50),
                "page": f"{page}?from={n}" if (page := self._chance.choice(pages)) != "/health" else page,
                "at": f"2026-01-31T12:{n // 60 % 60:02d}:{n % 60:02d}Z",
            }
            for n in range(first, first + count)
        ]
        log.append("clicks", more, atomic=True)
        self.rows += more


def environment(url: str, folder: Path, views: str) -> dict[str, str]:
    """What the script is told: the log, the shared folder for its state, and where its views are."""
    return {"LOG": url, "STATE": str(folder / "state"), "VIEWS": views}


def check(log: Log, views: str, clicks: Clicks) -> None:
    """No gap and no duplicate: topic, view and the changes of the view equal what DuckDB makes of the events."""
    ask = duckdb.connect()
    ask.register("clicks", pa.Table.from_pylist(clicks.rows))
    ask.execute(
        "create table visits as select n, split_part(page, '?', 1) as page, user_id from clicks where page <> '/health'"
    )
    expected = ask.execute("select n, page, user_id from visits order by n").fetchall()
    written = log.read("visits").select(["n", "page", "user_id"]).sort_by("n").to_pylist()
    assert [tuple(row.values()) for row in written] == expected
    answers = {
        page: (count, int(total))
        for page, count, total in ask.execute("select page, count(*), sum(n) from visits group by page").fetchall()
    }
    with hw.open_view(views, "per_page", log=log) as view:
        assert {row["page"]: (row["visits"], row["total"]) for row in view.rows().to_pylist()} == answers
    rows: dict[str, Any] = {}
    for event in log.read("per_page.changes").to_pylist():
        assert rows.pop(event["key"], None) == event["old"], event
        if event["new"] is not None:
            rows[event["key"]] = event["new"]
    assert {row["page"]: (row["visits"], row["total"]) for row in rows.values()} == answers
    counted: dict[str, tuple[int, int]] = {}
    for event in log.read("busy").to_pylist():
        assert counted.get(event["page"], (0, 0))[0] < event["visits"], f"{event} was counted from an older state"
        counted[event["page"]] = event["visits"], event["total"]
    assert counted == answers


def wait_until_right(log: Log, views: str, clicks: Clicks, *, state: Path, alive: Callable[[], bool], s: float) -> None:
    """Waits until the answers are right; while events are missing they cannot be, and what is there twice never goes away."""
    deadline = time.monotonic() + s
    while True:
        try:
            check(log, views, clicks)
            return
        except (AssertionError, HeadwaterError, duckdb.Error) as error:
            assert alive(), f"the application ended; it said: {read_status(state)}"
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {s:g} s; the application says: {read_status(state)}") from error
        time.sleep(0.3)


def children_named(pid: int, word: str) -> list[int]:
    """The processes below a process whose command has a word in it."""
    parents: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue

    def is_below(child: int) -> bool:
        while child in parents:
            child = parents[child]
            if child == pid:
                return True
        return False

    found = []
    for child in parents:
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in command and is_below(child) and child != os.getpid():
            found.append(child)
    return sorted(found)
