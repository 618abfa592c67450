"""`headwater produce`: every format it reads, and what it says of bad input."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rigs.commands import ORDERS, Command, refused, start


def test_json_lines_csv_and_parquet_give_the_same_events(command: Command) -> None:
    """Every format, from a file and from stdin, ends in the same rows."""
    rows = [{"id": "a,1", "amount": 1.5, "at": "2026-01-01T00:00:00Z"}, {"id": 'b"2', "amount": None, "at": None}]
    Path("o.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("o.csv").write_text('id,amount,at\n"a,1",1.5,2026-01-01T00:00:00Z\n"b""2",,\n')
    Path("o.tsv").write_text('id\tamount\tat\na,1\t1.5\t2026-01-01 00:00:00\n"b""2"\t\t\n')
    at = pa.array([1767225600000000, None], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"id": ["a,1", 'b"2'], "amount": [1.5, None], "at": at}), "o.parquet")
    for number, name in enumerate(["o.jsonl", "o.csv", "o.tsv", "o.parquet"]):
        kind = name.replace("tsv", "csv").partition(".")[2].replace("jsonl", "json")
        data = Path(name).read_bytes()
        delimiter = ["--delimiter", "\t"] if name == "o.tsv" else []
        for topic, files, stdin in ((f"f{number}", [name], b""), (f"s{number}", ["--format", kind, *delimiter], data)):
            command("topics", "create", topic, "--schema", ORDERS, "--key", "id")
            assert command("produce", topic, *files, stdin=stdin).code == 0
            assert sorted(command("tail", topic).rows, key=str) == rows, name


def test_compressed_files_are_read(orders: Command) -> None:

    Path("o.jsonl.gz").write_bytes(gzip.compress(b'{"id":"z"}\n'))
    assert "1 event appended" in orders("produce", "orders", "o.jsonl.gz").out


def test_a_file_larger_than_a_block_keeps_every_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks end at line breaks, and in CSV never inside of quotes."""
    monkeypatch.setattr(
        "headwater.formats.blocks.Blocks.__init__.__kwdefaults__", {"quotes": False, "block_bytes": 100}
    )
    lines = [f'{n},"line one\nline two, ""{n}"""\n' for n in range(500)]
    Path("big.csv").write_text("n,note\n" + "".join(lines))
    command("topics", "create", "notes", "--schema", "n BIGINT, note STRING", "--partitions", "1")
    assert "500 events" in command("produce", "notes", "big.csv").out
    rows = command("tail", "notes", "--from", "earliest").rows
    assert [row["n"] for row in rows] == list(range(500))
    assert rows[7]["note"] == 'line one\nline two, "7"'


def test_a_bad_line_is_named_and_everything_before_it_is_stored(orders: Command) -> None:
    """Correct the line, go on from there: nothing is stored twice and nothing is left out."""
    Path("bad.jsonl").write_text('{"id":"g1"}\n\n{"id":"g2"}\n{"id":"x","amount":"much"}\n{"id":"g3"}\n')
    refused(orders("produce", "orders", "bad.jsonl"), "schema_mismatch", "bad.jsonl:4", "amount", "2 events before it")
    assert [row["id"] for row in orders("tail", "orders", "--where", "id like 'g%'").rows] == ["g1", "g2"]


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("b.jsonl", '{"id":"a"}\n{"id":\n', "b.jsonl:2"),
        ("b.jsonl", '{"id":"a"}\n[1]\n', "b.jsonl:2"),
        ("b.jsonl", '{"id":"a"}\n{"id":"a"}{"id":"b"}\n', "b.jsonl:2"),
        ("b.jsonl", '{"id":"a"}\n{"id":"\udcff"}\n', "b.jsonl:2"),
        ("b.jsonl", '{"id":"a"}\n{"idd":"b"}\n', "Did you mean id"),
        ("b.jsonl", '{"id":"a"}\n{"at":"yesterday"}\n', "b.jsonl:2"),
        ("b.csv", "id,amount\na,1\nb,x\n", "b.csv:3"),
        ("b.csv", "id,amount\na,1\nb,1,2\n", "b.csv:3"),
        ("b.csv", 'id,amount\n"a\nb",1\nb,\udcff\n', "b.csv:4"),
        ("b.csv", "id,amnt\na,1\n", "Did you mean amount"),
        ("b.csv", "id,id\na,1\n", "twice"),
        ("b.parquet", "no parquet", "b.parquet"),
    ],
)
def test_bad_input_of_each_format_says_where_it_is(orders: Command, name: str, text: str, place: str) -> None:
    Path(name).write_bytes(text.encode(errors="surrogateescape"))
    refused(orders("produce", "orders", name), "(schema_mismatch|invalid_input)", place)


@pytest.mark.parametrize(
    ("good", "words"), [(1, "The log holds the 1 event before it"), (2, "The log holds the 2 events before it")]
)
def test_what_stands_before_a_bad_line_is_counted_in_words(orders: Command, good: int, words: str) -> None:
    """One and many."""
    result = orders("produce", "orders", stdin='{"id": "x"}\n' * good + "noise\n")
    refused(result, "schema_mismatch", words)


def test_skipped_lines_are_counted(orders: Command) -> None:
    lines = ['{"id":"g"}', '{"id":1}'] * 20
    result = orders("produce", "orders", "--skip-bad", stdin="\n".join(lines))
    assert result.code == 0 and "20 events appended" in result.out and "20 bad rows skipped" in result.out
    assert "stdin:2" in result.err and result.err.count("skipped stdin") == 5
    assert len(orders("tail", "orders", "--where", "id = 'g'", "-n", "100").rows) == 20


def test_bad_rows_of_parquet_are_named_by_their_number(command: Command) -> None:
    command("topics", "create", "small", "--schema", "n TINYINT NOT NULL")
    pq.write_table(pa.table({"n": [1, 2, 300, None, 5]}), "n.parquet")
    refused(command("produce", "small", "n.parquet"), "schema_mismatch", "n.parquet, row 3")
    assert "2 bad rows skipped" in command("produce", "small", "n.parquet", "--skip-bad").out
    pq.write_table(pa.table({"n": ["a"]}), "text.parquet")
    refused(command("produce", "small", "text.parquet", "--skip-bad"), "schema_mismatch", "text.parquet", "TINYINT")


@pytest.mark.parametrize(
    ("ddl", "value", "stored"),
    [
        ("v BIGINT", "7.0", 7),
        ("v DECIMAL(10, 2)", "1.25", 1.25),
        ("v DECIMAL(10, 2)", '"1.25"', 1.25),
        ("v DATE", '"2026-01-31"', "2026-01-31"),
        ("v TIMESTAMP_NTZ", '"2026-01-31T12:00:00"', "2026-01-31T12:00:00"),
        ("v TIMESTAMP", '"2026-01-31T12:00:00+02:00"', "2026-01-31T10:00:00Z"),
        ("v MAP<STRING, INT>", '{"a":1}', {"a": 1}),
        ("v STRUCT<a: INT, b: ARRAY<STRING>>", '{"a":1,"b":["x"]}', {"a": 1, "b": ["x"]}),
        ("v BINARY", '"text"', "text"),
        ("v BOOLEAN", "true", True),
    ],
)
def test_values_of_each_type_come_back_as_they_went_in(command: Command, ddl: str, value: str, stored: object) -> None:
    command("topics", "create", "values", "--schema", ddl)
    assert command("produce", "values", stdin=f'{{"v":{value}}}\n').code == 0
    assert command("tail", "values").rows == [{"v": stored}]
    assert command("sql", "select v from values_", "-l", "data").code == 1
    assert command("sql", 'select v from "values"').rows == [{"v": stored}]


@pytest.mark.parametrize(
    ("ddl", "value"), [("v DATE", "1"), ("v TIMESTAMP_NTZ", '"2026-01-31T12:00:00Z"'), ("v BIGINT", "1.5")]
)
def test_values_that_would_change_are_refused(command: Command, ddl: str, value: str) -> None:
    """The quick way of reading follows the same rules as `log.append`."""
    command("topics", "create", "values", "--schema", ddl)
    refused(command("produce", "values", stdin=f'{{"v":{value}}}\n'), "schema_mismatch", "stdin:1")


def test_a_topic_of_bytes_takes_lines(command: Command) -> None:
    command("topics", "create", "raw", "--partitions", "1")
    assert command("produce", "raw", stdin=b"hello\r\nwor\xffld").code == 0
    assert command("produce", "raw", "--key-separator", ":", stdin="k:v:w\n").code == 0
    refused(command("produce", "raw", "--key-separator", ":", stdin="k:v\nnone\n"), "schema_mismatch", "stdin:2")
    assert command("tail", "raw").rows == [
        {"key": None, "value": "hello"},
        {"key": None, "value": {"base64": "d29y/2xk"}},
        {"key": "k", "value": "v:w"},
        {"key": "k", "value": "v"},
    ]


@pytest.mark.parametrize("name", ["o.jsonl", "o.csv", "o.parquet"])
def test_a_topic_is_made_from_what_the_input_has(command: Command, name: str) -> None:
    Path("o.jsonl").write_text('{"id":"a","n":1,"at":"2026-01-01T00:00:00.5Z","none":null}\n')
    Path("o.csv").write_text("id,n,at,none\na,1,2026-01-01T00:00:00.5Z,\n")
    at = pa.array([1767225600500000], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"id": ["a"], "n": [1], "at": at, "none": [""]}), "o.parquet")
    assert command("produce", "new", name, "--create", "--key", "id", "--time", "at").code == 0
    [topic] = json.loads(command("topics", "list", "--json").out)
    assert topic["columns"] == "id STRING, n BIGINT, at TIMESTAMP, none STRING"
    assert (topic["key"], topic["time"], topic["events"]) == ("id", "at", 1)


def test_columns_cannot_be_guessed_from_nothing(command: Command) -> None:
    refused(command("produce", "new", "--create"), "invalid_input", "--schema")
    refused(command("produce", "new", "--create", stdin="no json"), "invalid_input", "--schema")


def test_produce_follows_a_pipe_that_stays_open(orders: Command) -> None:
    """What a program has written is stored before it writes more."""
    process = start("produce", "orders")
    assert process.stdin is not None
    process.stdin.write(b'{"id":"live"}\n{"id":"ha')
    process.stdin.flush()
    deadline = time.monotonic() + 20
    while not (found := orders("tail", "orders", "--where", "id = 'live'").rows) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found
    out, _ = process.communicate(b'lf"}\n', timeout=20)
    assert b"2 events appended" in out
