"""The invariants of a crash round, as questions to DuckDB over what the log holds and what the workers wrote down.

Each question has no answer when its invariant holds; every row of an answer is one violation. The tables:

    events  what the log holds in the end: topic, partition, place (the offset) and the columns of the events
    given   places that were acknowledged: worker, batch, topic, partition, place, row
    done    transactions and atomic appends that were acknowledged: worker, batch
    copied  how many lines of each source were acknowledged: worker, lines
    seen    what each life of each reader saw, in order: reader, poll, turn, topic, partition, place, worker, batch, row, line

It shares no code with the log except `Log.read`, which hands out its contents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from headwater.log.log import Log
from headwater.testing.oracle import Violation

INVARIANTS = {
    "offsets are dense": """
        SELECT topic, partition, count(*), min(place), max(place) FROM events
        GROUP BY ALL HAVING min(place) <> 0 OR max(place) <> count(*) - 1 OR count(DISTINCT place) <> count(*)
    """,
    "no event is torn": """
        SELECT topic, partition, place, text FROM events
        WHERE text <> repeat('x', ((coalesce(line, batch) * 31 + row * 7) % 300)::INT)
    """,
    "no event is stored twice": """
        SELECT worker, batch, row, line, count(*) FROM events GROUP BY ALL HAVING count(*) > 1
    """,
    "nothing acknowledged is lost or moved": """
        SELECT given.*, events.worker, events.batch, events.row FROM given LEFT JOIN events USING (topic, partition, place)
        WHERE events.worker IS DISTINCT FROM given.worker OR events.batch IS DISTINCT FROM given.batch
           OR events.row IS DISTINCT FROM given.row
    """,
    "no acknowledged transaction is lost": """
        SELECT * FROM done ANTI JOIN events USING (worker, batch)
    """,
    "transactions are all or nothing": """
        SELECT worker, batch, transaction_size, count(*) FROM events WHERE transaction_size IS NOT NULL
        GROUP BY ALL HAVING count(*) <> transaction_size
    """,
    "batches are whole, together and in order": """
        SELECT worker, batch, topic, partition, size, list(place ORDER BY place), list(row ORDER BY place) FROM events
        WHERE transaction_size IS NULL AND line IS NULL
        GROUP BY ALL HAVING count(*) <> size OR max(place) - min(place) <> size - 1
            OR list(row ORDER BY place) <> range(size)
    """,
    "no line is stored twice": """
        SELECT worker, line, count(*) FROM events WHERE line IS NOT NULL GROUP BY ALL HAVING count(*) > 1
    """,
    "no acknowledged line is lost": """
        SELECT worker, missing.line FROM (SELECT worker, max(lines) AS lines FROM copied GROUP BY worker) AS source,
            unnest(range(lines)) AS missing(line)
        WHERE NOT EXISTS (FROM events WHERE events.worker = source.worker AND events.line = missing.line)
    """,
    "no line is left out before another of its key": """
        SELECT worker, key, count(*), max(line) FROM events WHERE line IS NOT NULL
        GROUP BY ALL HAVING count(*) <> max(line) // 5 + 1
    """,
    "lines are in order": """
        SELECT * FROM (
            SELECT worker, topic, partition, place, line,
                lag(line) OVER (PARTITION BY worker, topic, partition ORDER BY place) AS before
            FROM events WHERE line IS NOT NULL
        ) WHERE line <= before
    """,
    "a key is in one partition": """
        SELECT topic, key, list(DISTINCT partition) FROM events GROUP BY ALL HAVING count(DISTINCT partition) > 1
    """,
    "readers saw every offset from the first, in order": """
        SELECT * FROM (
            SELECT reader, topic, partition, place,
                row_number() OVER (PARTITION BY reader, topic, partition ORDER BY turn) - 1 AS expected
            FROM seen
        ) WHERE place <> expected
    """,
    "readers saw what is there": """
        SELECT seen.*, events.worker, events.batch, events.row FROM seen LEFT JOIN events USING (topic, partition, place)
        WHERE events.worker IS DISTINCT FROM seen.worker OR events.batch IS DISTINCT FROM seen.batch
           OR events.row IS DISTINCT FROM seen.row OR events.line IS DISTINCT FROM seen.line
    """,
    "readers saw transactions whole, in one poll": """
        SELECT reader, seen.worker, seen.batch, count(*), list(DISTINCT poll), any_value(transaction_size)
        FROM seen JOIN events USING (topic, partition, place) WHERE transaction_size IS NOT NULL
        GROUP BY reader, seen.worker, seen.batch
        HAVING count(*) <> any_value(transaction_size) OR count(DISTINCT poll) > 1
    """,
    "readers saw batches whole, in one poll": """
        SELECT reader, seen.worker, seen.batch, count(*), list(DISTINCT poll), any_value(size)
        FROM seen JOIN events USING (topic, partition, place) WHERE transaction_size IS NULL AND events.line IS NULL
        GROUP BY reader, seen.worker, seen.batch
        HAVING count(*) <> any_value(size) OR count(DISTINCT poll) > 1
    """,
}

_EVENT_COLUMNS = ("key", "worker", "batch", "row", "size", "text", "line", "transaction_size", "_partition", "_offset")
_TABLES = {
    "given": "worker VARCHAR, batch BIGINT, topic VARCHAR, partition INT, place BIGINT, row INT",
    "done": "worker VARCHAR, batch BIGINT",
    "copied": "worker VARCHAR, lines BIGINT",
    "seen": """reader VARCHAR, poll INT, turn BIGINT, topic VARCHAR, partition INT, place BIGINT, worker VARCHAR,
               batch BIGINT, row INT, line BIGINT""",
}
_SHOWN = 5


def check_round(log: Log, topics: Iterable[str], accounts: Iterable[Path]) -> dict[str, int]:
    """Asks every question; `Violation` with the first answers. Returns how much was there to be asked about."""
    lines = [line for account in accounts for line in read_account(account)]
    errors = [line["error"] for line in lines if "error" in line]
    if errors:
        raise Violation(f"{len(errors)} workers met an error: {errors[0]}")
    with duckdb.connect() as database:
        _load(database, log, topics, lines)
        broken = {
            name: answer for name, question in INVARIANTS.items() if (answer := database.execute(question).fetchall())
        }
        if broken:
            raise Violation("; ".join(f"not true: {name}: {answer[:_SHOWN]}" for name, answer in broken.items()))
        tables = ("events", *_TABLES)
        return {table: database.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0] for table in tables}


def read_account(path: Path) -> list[dict[str, Any]]:
    """The lines of an account; a last one that was cut by the worker's death does not count, nor the poll it belongs to."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    lines: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
    finished = {(line["reader"], line["polled"]) for line in lines if "polled" in line}
    return [line for line in lines if "poll" not in line or (line["reader"], line["poll"]) in finished]


def _load(database: Any, log: Log, topics: Iterable[str], lines: list[dict[str, Any]]) -> None:
    contents = {topic: log.read(topic, columns=_EVENT_COLUMNS) for topic in topics}
    named = [
        table.append_column("topic", pa.array([topic] * len(table), pa.string())) for topic, table in contents.items()
    ]
    database.register("contents", pa.concat_tables(named))
    database.execute("CREATE TABLE events AS SELECT *, _partition AS partition, _offset AS place FROM contents")
    rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in _TABLES}
    for turn, line in enumerate(lines):
        match line:
            case {"first": first, "count": count}:
                place = (line["worker"], line["batch"], line["topic"], line["partition"])
                rows["given"] += [(*place, first + row, row) for row in range(count)]
            case {"lines": count}:
                rows["copied"].append((line["worker"], count))
            case {"poll": poll}:
                seen = ("topic", "partition", "offset", "worker", "batch", "row", "line")
                rows["seen"].append((line["reader"], poll, turn, *(line[name] for name in seen)))
            case {"batch": batch}:
                rows["done"].append((line["worker"], batch))
    for table, columns in _TABLES.items():
        database.execute(f"CREATE TABLE {table} ({columns})")
        if rows[table]:
            names = [f"c{number}" for number in range(len(rows[table][0]))]
            database.register(
                "fresh", pa.Table.from_arrays([pa.array(c) for c in zip(*rows[table], strict=True)], names)
            )
            database.execute(f"INSERT INTO {table} SELECT * FROM fresh")
            database.unregister("fresh")
