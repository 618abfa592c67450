"""What the tests of copies share: writers that keep their own account, and a comparison of two logs that DuckDB makes."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path

import duckdb
import pyarrow.parquet as parquet

import headwater as hw

PAUSE_S = 0.01
PLAIN = "id STRING, worker INT, n BIGINT, text STRING, at TIMESTAMP"
PAIR = "transaction STRING, size INT, row INT"


def make_topics(log: hw.Log) -> None:
    """One topic for plain appends, and two that transactions go to together."""
    log.create_topic("plain", PLAIN, key="id", time="at", partitions=3, segment_bytes=16_384)
    log.create_topic("left", PAIR, key="transaction", partitions=2, segment_bytes=16_384, durability="os")
    log.create_topic("right", PAIR, key="transaction", partitions=1, segment_bytes=16_384)


def write_until_told(folder: Path, worker: int, seed: int, *, pause_s: float = PAUSE_S) -> None:
    """Appends until a file `stop` is there: batches, deletions, headers, transactions, wider schemas, new topics."""
    chance = random.Random(seed * 100 + worker)
    count = widths = 0
    with (
        hw.open_log(folder / "log") as log,
        (folder / f"account.{worker}").open("a") as account,
        log.producer(id=f"worker {worker}", linger_ms=5) as producer,
    ):
        while not (folder / "stop").exists():
            kind = chance.random()
            count += 1
            stored: dict[str, dict[int, list[range]]] = {}
            if kind < 0.5:
                rows = [plain_row(worker, count, chance) for _ in range(chance.randint(1, 40))]
                stored["plain"] = {number: [span] for number, span in log.append("plain", rows).items()}
            elif kind < 0.6:
                log.append("plain", [{"id": f"k{chance.randrange(20)}", "_deleted": True}])
            elif kind < 0.7:
                producer.send("plain", plain_row(worker, count, chance), headers={"h": os.urandom(3)}).result()
            elif kind < 0.95:
                size = chance.randint(1, 20)
                rows = [{"transaction": f"{worker}.{count}", "size": size, "row": row} for row in range(size)]
                with log.transaction() as transaction:
                    transaction.append("left", rows)
                    transaction.append("right", rows)
                stored = transaction.offsets
            elif kind < 0.97:
                if worker == 0:
                    widths += 1
                    more = [f"more_{number} STRING" for number in range(widths)]
                    log.alter_topic("plain", schema=", ".join([PLAIN, *more]))
            elif kind < 0.98:
                log.create_topic(f"extra.{worker}", "n BIGINT", partitions=1, exist_ok=True)
                log.append(f"extra.{worker}", [{"n": count}])
            else:
                log.seal("plain")
            for topic, spans in stored.items():
                for number, ranges in spans.items():
                    line = [topic, number, ranges[0].start, ranges[-1].stop, f"{worker}.{count}"]
                    account.write(json.dumps(line) + "\n")
            account.flush()
            time.sleep(pause_s)


def await_lines(folder: Path, lines: int, *, timeout_s: float = 30.0) -> None:
    """Returns when the writers have so many lines of account together."""
    deadline = time.monotonic() + timeout_s
    while sum(account.read_bytes().count(b"\n") for account in folder.glob("account.*")) < lines:
        assert time.monotonic() < deadline, "the writers do not write"
        time.sleep(0.005)


def plain_row(worker: int, count: int, chance: random.Random) -> dict[str, object]:
    """A row that says who wrote it."""
    return {
        "id": f"k{chance.randrange(20)}",
        "worker": worker,
        "n": count,
        "text": "x" * chance.randrange(200),
        "at": f"2026-01-01T00:00:{chance.randrange(60):02}Z",
    }


def check_equal(source: Path, target: Path) -> int:
    """DuckDB finds no event that is in one log and not, at the same place and with the same content, in the other."""
    events = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        hw.open_log(source) as left,
        hw.open_log(target) as right,
    ):
        assert left.topics() == right.topics()
        for name in left.topics():
            topic = left.topic(name)
            assert topic.schemas == right.topic(name).schemas
            columns = [
                *topic.schema.names,
                "_partition",
                "_offset",
                "_time",
                "_appended",
                "_key",
                "_headers",
                "_deleted",
            ]
            files = []
            for side, log in (("left", left), ("right", right)):
                files.append(f"{folder}/{side}.parquet")
                parquet.write_table(log.read(name, columns=columns), files[-1])
            first, second = (f"select * replace (_headers::varchar as _headers) from '{file}'" for file in files)
            for one, other in ((first, second), (second, first)):
                assert duckdb.sql(f"({one}) except all ({other})").fetchall() == [], name
            events += duckdb.sql(f"select count(*) from '{files[0]}'").fetchall()[0][0]
    return events


def check_accounts(folder: Path, log_folder: Path, *, complete: bool = True) -> int:
    """What the writers were told is stored is there, at the offsets they were given; of each transaction all or nothing."""
    with hw.open_log(log_folder) as log:
        columns = ["_partition", "_offset"]
        plain = {
            (row["_partition"], row["_offset"]): f"{row['worker']}.{row['n']}"
            for row in log.read("plain", columns=["worker", "n", *columns]).to_pylist()
        }
        found = {"plain": plain}
        whole: dict[str, list[int]] = {}
        for name in ("left", "right"):
            rows = log.read(name, columns=["transaction", "size", *columns]).to_pylist()
            found[name] = {(row["_partition"], row["_offset"]): row["transaction"] for row in rows}
            for row in rows:
                whole.setdefault(row["transaction"], [row["size"], 0, 0])[1 + (name == "right")] += 1
    assert [counts for counts in whole.values() if counts != [counts[0]] * 3] == []
    lines = [
        json.loads(line) for account in folder.glob("account.*") for line in account.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]  # fmt: skip
    for topic, partition, start, stop, tag in lines:
        for offset in range(start, stop):
            if complete or (partition, offset) in found[topic]:
                assert found[topic].get((partition, offset)) == tag, (topic, partition, offset)
    return len(lines)
