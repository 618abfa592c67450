"""`headwater export` and `headwater import`: what leaves a topic for a file comes back as it was, or is refused."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import duckdb
import pytest

import headwater as hw
from tests.rigs.commands import Command, Result, refused

SCHEMA = (
    "id STRING NOT NULL, tiny TINYINT, small SMALLINT, whole INT, big BIGINT NOT NULL, ratio DOUBLE, half FLOAT, yes BOOLEAN, "
    "raw BINARY, day DATE, at TIMESTAMP, local TIMESTAMP_NTZ, price DECIMAL(20, 4), list ARRAY<BIGINT>, "
    "map MAP<STRING, BINARY>, struct STRUCT<a: STRING, b: ARRAY<BINARY>>"
)
FLAT = "id STRING NOT NULL, big BIGINT, ratio DOUBLE, yes BOOLEAN, day DATE, at TIMESTAMP, price DECIMAL(20, 4)"
SETTINGS = {"key": "id", "time": "at", "lateness": "5 seconds", "partitions": 3, "segment_bytes": 8192}


def row(number: int, chance: random.Random) -> dict[str, object]:
    """A row with nulls here and there, bytes that are no text, and text that is no ASCII."""

    def perhaps(value: object) -> object:
        return None if chance.random() < 0.2 else value

    raw = bytes(chance.randrange(256) for _ in range(chance.randrange(6)))
    return {
        "id": f"k{number % 17}-é",
        "tiny": perhaps(chance.randrange(-128, 128)),
        "small": perhaps(number),
        "whole": perhaps(-number),
        "big": (1 << 62) + number,
        "ratio": perhaps(chance.random() * 1e9),
        "half": perhaps(0.5 * number),
        "yes": perhaps(number % 2 == 0),
        "raw": perhaps(raw),
        "day": perhaps(date(2026, 1, 1 + number % 28)),
        "at": perhaps(datetime(2026, 1, 1, 0, 0, number % 60, number, UTC)),
        "local": perhaps(datetime(1999, 12, 31, 23, 59, number % 60, number)),  # noqa: DTZ001 - a time without a zone is meant
        "price": perhaps(Decimal(number).scaleb(-4) + 12_345_678_901),
        "list": perhaps([1, number]),
        "map": perhaps({"a": raw, "": b"text"}),
        "struct": perhaps({"a": perhaps('x\n"y",'), "b": [raw, b"\xff"]}),
    }


def fill(log: hw.Log) -> None:
    """Three hundred events: some with headers, some deletions, over many segments."""
    chance = random.Random(7)
    log.create_topic("wide", SCHEMA, **SETTINGS)
    log.append("wide", [row(number, chance) for number in range(250)])
    log.append("wide", [{"id": f"k{number}-é", "_deleted": True} for number in range(10)])
    with log.producer() as producer:
        for number in range(40):
            producer.send("wide", row(number, chance), headers={"trace": bytes([255, number]), "text": b"plain"})


def events(log: hw.Log, topic: str) -> list[object]:
    """Everything an event carries but its append time, as plain Python, by partition."""
    with log.reader(topic) as reader:
        found = []
        while polled := reader.poll(timeout_s=0):
            found += polled
    return sorted(
        ((e.partition, e.offset, e.key, repr(e.value), repr(e.headers)) for e in found), key=lambda event: event[:2]
    )


@pytest.mark.parametrize("form", ["parquet", "arrow", "json"])
def test_a_topic_comes_back_from_a_file_as_it_was(command: Command, form: str) -> None:
    """Values, types, keys, headers, deletions, order and count; Parquet and Arrow files even make the same topic again."""
    with hw.open_log("data") as log:
        fill(log)
        before, described = events(log, "wide"), log.topic("wide")
    exported = command("export", "wide", f"wide.{form}")
    assert exported.rows[0] | {"bytes": 0} == {
        "topic": "wide", "file": f"wide.{form}", "format": form, "events": 300, "bytes": 0
    }  # fmt: skip
    if form == "json":
        with hw.open_log("data") as log:
            log.create_topic("again", SCHEMA, **SETTINGS)
    imported = command("import", f"wide.{form}", "again", *(["--create"] if form != "json" else []))
    assert imported.rows[0]["events"] == 300, imported.err
    with hw.open_log("data") as log:
        assert events(log, "again") == before
        made = log.topic("again")
    kept = ("schemas", "key", "time", "lateness_us", "future_us", "partitions", "segment_bytes", "event_bytes_max")
    assert all(getattr(made, name) == getattr(described, name) for name in kept)


@pytest.mark.parametrize("form", ["parquet", "arrow", "json"])
def test_a_topic_of_bytes_comes_back(command: Command, form: str) -> None:
    with hw.open_log("data") as log:
        log.create_topic("bytes", partitions=2)
        log.append("bytes", [{"key": b"\xff\x00", "value": b"\xfe"}, {"key": b"k", "value": None}, {"value": b"plain"}])
        before = events(log, "bytes")
        if form == "json":
            log.create_topic("again", partitions=2)
    command("export", "bytes", f"bytes.{form}")
    assert command("import", f"bytes.{form}", "again", "--create").rows[0]["events"] == 3
    with hw.open_log("data") as log:
        keyed = [event[2:] for event in before]
        assert sorted(map(repr, keyed)) == sorted(repr(event[2:]) for event in events(log, "again"))
        assert log.topic("again").has_schema is False


def test_csv_comes_back_and_duckdb_reads_it_too(command: Command) -> None:
    """An oracle of others: DuckDB sees the same rows in the CSV and the Parquet file."""
    with hw.open_log("data") as log:
        log.create_topic("flat", FLAT, key="id", time="at", partitions=2)
        chance = random.Random(3)
        names = [part.split()[0] for part in FLAT.split(", ") if " " in part]
        log.append("flat", [{n: v for n, v in row(i, chance).items() if n in names} for i in range(100)])
        before = events(log, "flat")
        log.create_topic("again", FLAT, key="id", time="at", partitions=2)
    command("export", "flat", "flat.csv")
    command("export", "flat", "flat.parquet")
    assert command("import", "flat.csv", "again").rows[0]["events"] == 100
    with hw.open_log("data") as log:
        assert events(log, "again") == before
    columns = "id, big, ratio, yes, day, price"
    types = "{'id': 'VARCHAR', 'big': 'BIGINT', 'ratio': 'DOUBLE', 'yes': 'BOOLEAN', 'day': 'DATE', 'price': 'DECIMAL(20,4)'}"
    first = duckdb.sql(f"select {columns} from read_csv('flat.csv', types={types})").fetchall()
    assert first == duckdb.sql(f"select {columns} from 'flat.parquet'").fetchall()
    assert len(first) == 100


def test_from_and_to_cut_out_a_part(command: Command) -> None:
    with hw.open_log("data") as log:
        log.create_topic("t", "n BIGINT", partitions=1)
        log.append("t", [{"n": n} for n in range(50)])
    assert command("export", "t", "part.json", "--from", 10, "--to", 20).rows[0]["events"] == 10
    assert [json.loads(line)["n"] for line in Path("part.json").read_text().splitlines()] == list(range(10, 20))
    assert command("export", "t", "-", "--from", 48).out == '{"n":48}\n{"n":49}\n'
    assert command("export", "t", "none.parquet", "--from", 20, "--to", 10).rows[0]["events"] == 0
    assert command("import", "none.parquet", "empty", "--create").rows[0]["events"] == 0


def test_what_a_format_cannot_hold_is_refused(command: Command) -> None:
    """And no file is left, nor half of one."""
    with hw.open_log("data") as log:
        log.create_topic("nested", "id STRING, list ARRAY<INT>", key="id")
        log.create_topic("bytes")
        log.create_topic("gone", "id STRING", key="id")
        log.append("gone", [{"id": "a", "_deleted": True}])
        log.create_topic("odd", "x DOUBLE, deep STRUCT<y: ARRAY<DOUBLE>>")
        log.append("odd", [{"x": 1.0, "deep": {"y": [float("nan")]}}])
        log.create_topic("keys", "m MAP<INT, STRING>")
    refused(command("export", "nested", "x.csv"), "unsupported", "list", "parquet")
    refused(command("export", "bytes", "x.csv"), "unsupported", "binary")
    refused(command("export", "gone", "x.csv"), "unsupported", "deletions")
    refused(command("export", "odd", "x.json"), "unsupported", "deep", "NaN")
    refused(command("export", "keys", "x.json"), "unsupported", "keys")
    refused(command("export", "odd", "-", "--format", "parquet"), "unsupported", "stdout")
    assert not list(Path().glob("x.*"))


def test_wrong_names_and_files_are_told(command: Command) -> None:
    with hw.open_log("data") as log:
        log.create_topic("t", "n BIGINT")
        log.append("t", [{"n": 1}])
    Path("there.json").write_text("mine")
    refused(command("export", "t", "there.json"), "invalid_input", "--force")
    assert Path("there.json").read_text() == "mine"
    assert command("export", "t", "there.json", "--force").code == 0
    refused(command("export", "nope", "x.json"), "topic_not_found")
    refused(command("export", "t", "no/such/folder/x.json"), "file_not_found")
    refused(command("export", "t", "x.json", "--from", "yesterdayish"), "invalid_input", "earliest")
    refused(command("import", "there.json", "nope"), "topic_not_found", "--create")
    refused(command("produce", "nope"), "topic_not_found", "--create")
    refused(command("export", "nope", "x.xml"), "invalid_input", ".xml", ".parquet", "--format")
    assert not Path("x.xml").exists()
    refused(command("import", "nothing.json", "t"), "file_not_found")
    Path("noise.arrow").write_bytes(b"ARROW1 no")
    refused(command("import", "noise.arrow", "t"), "invalid_input", "Arrow")
    command("export", "t", "t.parquet")
    whole = Path("t.parquet").read_bytes()
    Path("t.parquet").write_bytes(whole[: len(whole) // 2])
    refused(command("import", "t.parquet", "t"), "invalid_input", "Parquet")
    refused(command("import", "there.json", "t", "--key", "n"), "invalid_input", "--create")
    Path("bad.json").write_text('{"n": 1}\n{"n": "x"}\n')
    stopped = command("import", "bad.json", "t")
    assert stopped.code == 1 and "bad.json:2" in stopped.err and "1 event appended" in stopped.err


def test_files_of_others_are_read_too(command: Command) -> None:
    """A Parquet file without our note makes a topic of its columns."""
    duckdb.sql("copy (select range as n, 'x' || range as s from range(1000)) to 'other.parquet' (format parquet)")
    made: Result = command("import", "other.parquet", "other", "--create", "--key", "s", "--partitions", 2)
    assert made.rows[0]["events"] == 1000
    with hw.open_log("data") as log:
        assert log.topic("other").key == "s" and log.read("other").num_rows == 1000
