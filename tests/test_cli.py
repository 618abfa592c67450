"""The command line: each command, what it prints in a pipe, and what it says when something is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headwater as hw
from headwater.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "headwater.cli.main"]
SCHEMA = "id STRING, amount DOUBLE, at TIMESTAMP"
NOBODY = 65534


@dataclass(frozen=True)
class Result:
    """What a call of the command line left behind."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, object]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Result]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Cli:
    """Calls the command line in a folder of its own, where `data` is the log; no call may end in a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWATER_LOG", "./data")
    monkeypatch.setenv("HEADWATER_DEBUG", "")

    def call(*arguments: object, stdin: str | bytes = b"") -> Result:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        monkeypatch.setattr(sys, "argv", ["headwater", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = (text.decode() for text in capsysbinary.readouterr())
        assert "Traceback" not in out + err
        code = ended.value.code
        return Result(code if isinstance(code, int) else 0, out, err)

    return call


@pytest.fixture
def orders(cli: Cli) -> Cli:
    """The command line, with a topic `orders` of three events."""
    assert cli("topics", "create", "orders", "--schema", SCHEMA, "--key", "id", "--time", "at").code == 0
    lines = [{"id": f"o{n}", "amount": n + 0.5, "at": f"2026-01-0{n}T00:00:00Z"} for n in (1, 2, 3)]
    assert cli("produce", "orders", stdin="".join(json.dumps(line) + "\n" for line in lines)).code == 0
    return cli


def refused(result: Result, code: str, *words: str) -> None:
    """Check that an error is told as it should be: code, what happened and what to do next, on stderr only."""
    assert result.code == 1
    assert not result.out
    assert re.search(rf"^error \[{code}\]: ", result.err, re.MULTILINE), result.err
    assert re.search(r"^next: ", result.err, re.MULTILINE), result.err
    for word in words:
        assert word in result.err


def test_a_new_topic_is_listed_and_shown(cli: Cli) -> None:
    created = cli("topics", "create", "orders", "--schema", SCHEMA, "--key", "id", "--time", "at", "--partitions", "2")
    assert (created.code, "2 partitions" in created.out) == (0, True)
    assert "orders" in cli("topics", "list").out
    [row] = json.loads(cli("topics", "list", "--json").out)
    assert row["partitions"] == 2 and row["events"] == 0 and row["key"] == "id" and row["bytes"] > 0
    shown = cli("topics", "show", "orders")
    assert SCHEMA in shown.out and "fsync" in shown.out


def test_show_says_what_each_partition_holds(orders: Cli) -> None:
    shown = json.loads(orders("topics", "show", "orders", "--json").out)
    assert sum(part["end"] - part["first"] for part in shown["partitions"]) == 3
    assert all((part["newest"] is None) == (part["end"] == 0) for part in shown["partitions"])


def test_a_damaged_topic_does_not_hide_the_others(orders: Cli) -> None:
    orders("topics", "create", "other")
    Path("data/topics/orders/topic").write_bytes(b"noise")
    listed = orders("topics", "list")
    assert listed.code == 0 and "other" in listed.out and "damaged" in listed.out


def test_columns_are_added_and_old_events_are_read_with_nulls(orders: Cli) -> None:
    assert "note STRING" in orders("topics", "alter", "orders", "--add-column", "note STRING").out
    assert orders("tail", "orders").rows[0]["note"] is None
    refused(orders("topics", "alter", "orders", "--schema", "id STRING"), "schema_conflict", "amount")
    refused(orders("topics", "alter", "orders"), "invalid_input")


def test_a_topic_is_kept_small_by_its_settings(orders: Cli) -> None:
    """Each is given, changed, shown, and obeyed on demand."""
    settings = ["--retention", "7 days", "--retention-bytes", 1 << 30, "--compact", "--tombstones", "1 hour"]
    more = ["--bytes-max", 1 << 31, "--overload", "reject", "--archive", "file:///tmp/archive"]
    assert orders("topics", "create", "kept", "--schema", SCHEMA, "--key", "id", *settings, *more).code == 0
    shown = json.loads(orders("topics", "show", "kept", "--json").out)
    assert (shown["retention_us"], shown["retention_bytes"]) == (7 * 86_400_000_000, 1 << 30)
    assert (shown["compact"], shown["tombstones_us"]) == (True, 3_600_000_000)
    assert (shown["bytes_max"], shown["overload"], shown["archive"]) == (1 << 31, "reject", "file:///tmp/archive")
    changes = ["--retention", "forever", "--retention-bytes", 0, "--no-compact", "--bytes-max", 0, "--archive", ""]
    assert orders("topics", "alter", "kept", *changes).code == 0
    shown = json.loads(orders("topics", "show", "kept", "--json").out)
    assert (shown["retention_us"], shown["retention_bytes"], shown["compact"]) == (None, None, False)
    assert (shown["bytes_max"], shown["archive"], shown["hours_to_overtaken"]) == (None, None, None)
    refused(orders("topics", "create", "x", "--compact", "--overload", "drop_oldest"), "invalid_input")
    refused(
        orders("topics", "create", "x", "--schema", "id INT", "--key", "id", "--compact", "--retain", "until_acked"),
        "invalid_input",
        "retain",
    )
    orders("topics", "create", "work", "--retain", "until_acked", "--overload", "buffer", "--buffer-bytes", 1 << 20)
    shown = json.loads(orders("topics", "show", "work", "--json").out)
    assert (shown["retain"], shown["overload"], shown["buffer_bytes"]) == ("until_acked", "buffer", 1 << 20)
    orders("topics", "alter", "work", "--retain", "all", "--overload", "block")
    shown = json.loads(orders("topics", "show", "work", "--json").out)
    assert (shown["retain"], shown["overload"], shown["buffer_bytes"]) == ("all", "block", None)
    refused(orders("topics", "alter", "work", "--buffer-bytes", 0), "invalid_input", "buffer_bytes")
    orders("topics", "alter", "orders", "--retention", "1 us")
    assert orders("topics", "tidy", "orders").out == "removed 3 events of topic orders\n"
    assert orders("topics", "tidy", "orders").out == "removed 0 events of topic orders\n"


def test_deleting_needs_a_yes(orders: Cli) -> None:
    refused(orders("topics", "delete", "orders"), "invalid_input", "3 events", "--yes")
    assert orders("topics", "delete", "orders", "--yes").code == 0
    refused(orders("topics", "show", "orders"), "topic_not_found")


@pytest.mark.parametrize(
    "name",
    ["../evil", "/etc/passwd", "..", ".", "a/b", "", "x" * 500, "ünïcode", "a\x1b[31mb", "sp ace", "nul\0", "-x"],
)
def test_hostile_names_are_refused_everywhere(orders: Cli, name: str) -> None:
    """Nothing outside of the log's folder is touched, and no escape sequence reaches the terminal."""
    before = sorted(Path().rglob("*"))
    for command in (["topics", "create"], ["topics", "show"], ["topics", "delete", "--yes"], ["produce"], ["tail"]):
        result = orders(*command, "--", name, stdin="{}")
        refused(result, "invalid_name")
        assert "\x1b" not in result.err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["topics", "create", "orders"], "topic_exists"),
        (["topics", "create", "x", "--key", "id"], "invalid_input"),
        (["topics", "create", "x", "--schema", "id FOO"], "invalid_schema"),
        (["topics", "create", "x", "--schema", "id STRING", "--key", "nope"], "invalid_input"),
        (["topics", "create", "x", "--schema", "id STRING", "--time", "id"], "invalid_input"),
        (["topics", "create", "x", "--partitions", "0"], "invalid_input"),
        (["topics", "create", "x", "--lateness", "soon"], "invalid_input"),
        (["topics", "show", "nope"], "topic_not_found"),
        (["produce", "nope"], "topic_not_found"),
        (["produce", "orders", "nope.jsonl"], "file_not_found"),
        (["produce", "orders", "."], "invalid_input"),
        (["produce", "orders", "--key", "id"], "invalid_input"),
        (["produce", "orders", "--key-separator", ":"], "invalid_input"),
        (["produce", "orders", "--delimiter", "ab"], "invalid_input"),
        (["tail", "nope"], "topic_not_found"),
        (["tail", "orders", "--columns", "nope"], "invalid_input"),
        (["tail", "orders", "--columns", ","], "invalid_input"),
        (["tail", "orders", "--from", "bogus"], "invalid_input"),
        (["tail", "orders", "--from", "99"], "invalid_input"),
        (["tail", "orders", "--where", "nope > 1"], "invalid_input"),
        (["tail", "orders", "--where", "amount >"], "invalid_input"),
        (["sql", "select * from nope"], "topic_not_found"),
        (["sql", "selec"], "invalid_input"),
        (["sql", "select 1; select 2"], "invalid_input"),
        (["sql", ""], "invalid_input"),
        (["-l", "s3://x", "topics", "list"], "unsupported"),
        (["-l", "memory://", "doctor"], "unsupported"),
    ],
)
def test_what_cannot_work_is_told_with_code_and_advice(orders: Cli, arguments: list[str], code: str) -> None:
    result = orders(*arguments)
    assert "events appended" not in result.out
    refused(result, code)


@pytest.mark.parametrize(
    "command",
    [
        ["topics", "list"],
        ["topics", "delete", "x", "--yes"],
        ["produce", "x"],
        ["tail", "x"],
        ["sql", "select 1"],
        ["doctor"],
    ],
)
def test_only_create_makes_a_log(cli: Cli, command: list[str]) -> None:
    refused(cli(*command), "log_not_found", "--log")
    assert not Path("data").exists()


def test_wrong_usage_ends_with_code_two(cli: Cli) -> None:
    assert cli("topics", "create", "x", "--durability", "perhaps").code == 2
    assert cli("nope").code == 2


def test_the_log_is_named_before_or_behind_the_command(orders: Cli) -> None:
    assert json.loads(orders("topics", "list", "--json", "-l", "data").out)[0]["topic"] == "orders"
    assert json.loads(orders("--log", f"file://{Path('data').resolve()}", "topics", "list", "--json").out)
    refused(orders("topics", "list", "-l", "elsewhere"), "log_not_found")


def test_json_lines_csv_and_parquet_give_the_same_events(cli: Cli) -> None:
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
            cli("topics", "create", topic, "--schema", SCHEMA, "--key", "id")
            assert cli("produce", topic, *files, stdin=stdin).code == 0
            assert sorted(cli("tail", topic).rows, key=str) == rows, name


def test_compressed_files_are_read(orders: Cli) -> None:
    import gzip

    Path("o.jsonl.gz").write_bytes(gzip.compress(b'{"id":"z"}\n'))
    assert "1 event appended" in orders("produce", "orders", "o.jsonl.gz").out


def test_a_file_larger_than_a_block_keeps_every_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks end at line breaks, and in CSV never inside of quotes."""
    monkeypatch.setattr("headwater.cli.blocks.Blocks.__init__.__kwdefaults__", {"quotes": False, "block_bytes": 100})
    lines = [f'{n},"line one\nline two, ""{n}"""\n' for n in range(500)]
    Path("big.csv").write_text("n,note\n" + "".join(lines))
    cli("topics", "create", "notes", "--schema", "n BIGINT, note STRING", "--partitions", "1")
    assert "500 events" in cli("produce", "notes", "big.csv").out
    rows = cli("tail", "notes", "--from", "earliest").rows
    assert [row["n"] for row in rows] == list(range(500))
    assert rows[7]["note"] == 'line one\nline two, "7"'


def test_a_bad_line_is_named_and_everything_before_it_is_stored(orders: Cli) -> None:
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
def test_bad_input_of_each_format_says_where_it_is(orders: Cli, name: str, text: str, place: str) -> None:
    Path(name).write_bytes(text.encode(errors="surrogateescape"))
    refused(orders("produce", "orders", name), "(schema_mismatch|invalid_input)", place)


def test_skipped_lines_are_counted(orders: Cli) -> None:
    lines = ['{"id":"g"}', '{"id":1}'] * 20
    result = orders("produce", "orders", "--skip-bad", stdin="\n".join(lines))
    assert result.code == 0 and "20 events appended" in result.out and "20 bad skipped" in result.out
    assert "stdin:2" in result.err and result.err.count("skipped stdin") == 5
    assert len(orders("tail", "orders", "--where", "id = 'g'", "-n", "100").rows) == 20


def test_bad_rows_of_parquet_are_named_by_their_number(cli: Cli) -> None:
    cli("topics", "create", "small", "--schema", "n TINYINT NOT NULL")
    pq.write_table(pa.table({"n": [1, 2, 300, None, 5]}), "n.parquet")
    refused(cli("produce", "small", "n.parquet"), "schema_mismatch", "n.parquet, row 3")
    assert "2 bad skipped" in cli("produce", "small", "n.parquet", "--skip-bad").out
    pq.write_table(pa.table({"n": ["a"]}), "text.parquet")
    refused(cli("produce", "small", "text.parquet", "--skip-bad"), "schema_mismatch", "text.parquet", "TINYINT")


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
def test_values_of_each_type_come_back_as_they_went_in(cli: Cli, ddl: str, value: str, stored: object) -> None:
    cli("topics", "create", "values", "--schema", ddl)
    assert cli("produce", "values", stdin=f'{{"v":{value}}}\n').code == 0
    assert cli("tail", "values").rows == [{"v": stored}]
    assert cli("sql", "select v from values_", "-l", "data").code == 1
    assert cli("sql", 'select v from "values"').rows == [{"v": stored}]


@pytest.mark.parametrize(
    ("ddl", "value"), [("v DATE", "1"), ("v TIMESTAMP_NTZ", '"2026-01-31T12:00:00Z"'), ("v BIGINT", "1.5")]
)
def test_values_that_would_change_are_refused(cli: Cli, ddl: str, value: str) -> None:
    """The quick way of reading follows the same rules as `log.append`."""
    cli("topics", "create", "values", "--schema", ddl)
    refused(cli("produce", "values", stdin=f'{{"v":{value}}}\n'), "schema_mismatch", "stdin:1")


def test_a_topic_of_bytes_takes_lines(cli: Cli) -> None:
    cli("topics", "create", "raw", "--partitions", "1")
    assert cli("produce", "raw", stdin=b"hello\r\nwor\xffld").code == 0
    assert cli("produce", "raw", "--key-separator", ":", stdin="k:v:w\n").code == 0
    refused(cli("produce", "raw", "--key-separator", ":", stdin="k:v\nnone\n"), "schema_mismatch", "stdin:2")
    assert cli("tail", "raw").rows == [
        {"key": None, "value": "hello"},
        {"key": None, "value": {"base64": "d29y/2xk"}},
        {"key": "k", "value": "v:w"},
        {"key": "k", "value": "v"},
    ]


@pytest.mark.parametrize("name", ["o.jsonl", "o.csv", "o.parquet"])
def test_a_topic_is_made_from_what_the_input_has(cli: Cli, name: str) -> None:
    Path("o.jsonl").write_text('{"id":"a","n":1,"at":"2026-01-01T00:00:00.5Z","none":null}\n')
    Path("o.csv").write_text("id,n,at,none\na,1,2026-01-01T00:00:00.5Z,\n")
    at = pa.array([1767225600500000], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"id": ["a"], "n": [1], "at": at, "none": [""]}), "o.parquet")
    assert cli("produce", "new", name, "--create", "--key", "id", "--time", "at").code == 0
    [topic] = json.loads(cli("topics", "list", "--json").out)
    assert topic["columns"] == "id STRING, n BIGINT, at TIMESTAMP, none STRING"
    assert (topic["key"], topic["time"], topic["events"]) == ("id", "at", 1)


def test_columns_cannot_be_guessed_from_nothing(cli: Cli) -> None:
    refused(cli("produce", "new", "--create"), "invalid_input", "--schema")
    refused(cli("produce", "new", "--create", stdin="no json"), "invalid_input", "--schema")


def test_tail_shows_the_last_events_or_all_from_a_place(cli: Cli) -> None:
    cli("topics", "create", "n", "--schema", "n BIGINT, at TIMESTAMP", "--time", "at", "--partitions", "3")
    for n in range(12):
        cli("produce", "n", stdin=f'{{"n":{n},"at":"2026-01-01T00:00:{n:02d}Z"}}\n')

    def tail(*more: str) -> list[object]:
        return [row["n"] for row in cli("tail", "n", *more).rows]

    assert tail() == list(range(2, 12)), "the newest ten, in the order in which they were appended"
    assert tail("-n", "2") == [10, 11]
    assert tail("--from", "earliest") == list(range(12))
    assert tail("--from", "earliest", "--limit", "3") == [0, 1, 2]
    assert tail("--from", "latest") == []
    assert tail("--from", "2026-01-01T00:00:09") == [9, 10, 11]
    assert tail("--from", "1 second") == []
    assert tail("--where", "n % 2 = 0", "-n", "3") == [6, 8, 10], "the newest three for which it is true"
    assert sorted(tail("--from", "3"), key=int) == tail("--from", "3"), "an offset, in every partition that has it"
    assert cli("tail", "n", "-n", "1", "--columns", "_offset,n").rows[0].keys() == {"_offset", "n"}
    assert {"_partition", "_time", "_appended", "_key", "n"} <= cli("tail", "n", "-n", "1", "--meta").rows[0].keys()


def test_tail_counts_events_and_not_the_gaps_of_compaction(cli: Cli, tmp_path: Path) -> None:
    """The last N of them, however far apart their offsets are."""
    with hw.open_log(str(tmp_path / "data")) as log:
        log.create_topic("t", "id STRING, n INT", key="id", partitions=1, segment_bytes=4096, compact=True)
        log.append("t", [{"id": f"k{n}", "n": n} for n in range(5)])
        for number in range(300):
            log.append("t", [{"id": "busy", "n": number}])
        log.tidy("t")
        held = log.read("t")["n"].to_pylist()
    assert held[:5] == list(range(5)) and 5 < len(held) < 200
    for count in (1, 3, len(held) - 3, len(held), len(held) + 3):
        assert [row["n"] for row in cli("tail", "t", "-n", str(count)).rows] == held[-count:]


def test_what_tail_prints_produce_takes_back(orders: Cli) -> None:
    """Deletions and headers travel too."""
    with hw.open_log("data") as log, log.producer() as producer:
        producer.send("orders", None, key="o1")
        producer.send("orders", {"id": "o4"}, headers={"trace": b"x"})
    printed = orders("tail", "orders")
    assert printed.rows[-1] == {"id": "o4", "amount": None, "at": None, "_headers": {"trace": "x"}} or printed.rows[-2]
    orders("topics", "create", "copy", "--schema", SCHEMA, "--key", "id", "--time", "at")
    assert orders("produce", "copy", stdin=printed.out).code == 0
    with hw.open_log("data") as log:
        assert log.table("copy").sort_by("id").equals(log.table("orders").sort_by("id"))


def test_tables_cannot_be_steered_by_what_a_topic_holds(orders: Cli) -> None:
    orders("produce", "orders", stdin='{"id":"\\u001b[2J\\nx","amount":1}\n')
    for command in (["tail", "orders", "--format", "table"], ["sql", "from orders", "--format", "table"]):
        printed = orders(*command).out
        assert "\x1b" not in printed and "\\x1b[2J" in printed


def test_sql_answers_over_topics(orders: Cli) -> None:
    assert orders("sql", "select sum(amount) as total, count(*) as n from orders").rows == [{"total": 7.5, "n": 3}]
    assert orders("sql", "select id from Orders where amount > 2 order by 1", "--format", "csv").out == "id\no2\no3\n"
    assert "o3" in orders("sql", "from orders", "--format", "table").out
    assert len(orders("sql", "select a.id from orders a join orders b using (id)").rows) == 3, "a topic twice"
    [meta] = orders("sql", "select _partition, _offset, _time, _appended, _key, _deleted from orders limit 1").rows
    assert meta["_key"] in {"o1", "o2", "o3"} and meta["_deleted"] is False
    assert orders("sql", "select 1 as a, 2 as a").rows == [{"a": 1, "a_1": 2}]


def test_sql_takes_names_with_dots_and_dashes_in_quotes(cli: Cli) -> None:
    cli("topics", "create", "shop.orders-eu")
    cli("produce", "shop.orders-eu", stdin="x\n")
    assert cli("sql", 'select value from "shop.orders-eu"').rows == [{"value": "x"}]
    refused(cli("sql", "select * from shop.orders"), "(topic_not_found|invalid_input)", "double quotes")


@pytest.mark.parametrize(
    "query",
    [
        "insert into orders values (1)",
        "create table t as select 1",
        "copy (select 1) to 'out.csv'",
        "select * from read_csv('secret.csv')",
        "select * from 'secret.csv'",
        "attach 'x.db'",
        "set enable_external_access = true",
        "install httpfs",
    ],
)
def test_sql_only_reads_and_only_topics(orders: Cli, query: str) -> None:
    Path("secret.csv").write_text("a\n1\n")
    refused(orders("sql", query), "(invalid_input|topic_not_found)")
    assert not Path("out.csv").exists() and not Path("x.db").exists()


def test_doctor_finds_and_repairs(orders: Cli) -> None:
    """Exit code 1 says that an error remains."""
    assert "healthy" in orders("doctor").out
    head = next(Path("data/topics/orders").glob("*/head"))
    head.write_bytes(b"\xff" * head.stat().st_size)
    found = orders("doctor")
    assert found.code == 1 and str(head.name) in found.out and "--repair" in found.out
    assert json.loads(orders("doctor", "--json").out)["findings"][0]["severity"] == "error"
    repaired = orders("doctor", "--repair")
    assert repaired.code == 0 and "repaired" in repaired.out
    assert "healthy" in orders("doctor").out
    assert len(orders("tail", "orders").rows) == 3


def test_damaged_events_are_never_served(orders: Cli) -> None:
    for frames in Path("data/topics/orders").glob("*/*.frames"):
        data = bytearray(frames.read_bytes())
        at = data.find(b"o1")
        if at > 0:
            data[at : at + 2] = b"XX"
            frames.write_bytes(data)
    for command in (["tail", "orders"], ["sql", "select * from orders"]):
        result = orders(*command)
        assert result.code == 1 and "error [damaged]" in result.err and "XX" not in result.out


def test_a_folder_of_a_newer_format_is_refused(orders: Cli) -> None:
    marker = Path("data/headwater")
    marker.write_bytes(re.sub(rb"^headwater log \d+", b"headwater log 99", marker.read_bytes()))
    for command in (["topics", "list"], ["tail", "orders"], ["produce", "orders"], ["topics", "create", "x"]):
        refused(orders(*command), "format_too_new", "99", "Upgrade")


def test_the_debug_flag_shows_the_traceback(orders: Cli) -> None:
    process = subprocess.run([*COMMAND, "--debug", "tail", "nope"], capture_output=True, text=True)
    assert process.returncode == 1 and "Traceback" in process.stderr and "error [topic_not_found]" in process.stderr


def test_an_unexpected_error_is_told_as_a_bug(orders: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.log.log.Log.topics", lambda log: 1 / 0)
    refused(orders("topics", "list"), "bug", "HEADWATER_DEBUG")


AS_NOBODY = f"""
import contextlib, io, os, sys
from headwater.cli.main import main

def call():
    try:
        main()
    except SystemExit as ended:
        return ended.code

if os.geteuid() == 0:
    # Root may do everything, so it becomes somebody else; not before every module is loaded, which only root may read.
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())), contextlib.redirect_stderr(io.StringIO()):
        call()
    os.setgid({NOBODY})
    os.setuid({NOBODY})
sys.exit(call())
"""


def as_nobody(*arguments: str) -> Result:
    """Call the command line as a user without rights."""
    process = subprocess.run([sys.executable, "-c", AS_NOBODY, *arguments], capture_output=True, text=True)
    return Result(process.returncode, process.stdout, process.stderr)


@pytest.fixture
def reachable(orders: Cli) -> Iterator[Path]:
    """A log with a topic `orders` in a folder that every user can reach; pytest's own folders are private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copytree("data", f"{folder}/data"))
        for path in [Path(folder) / "data", *Path(folder).rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_folder_without_rights_is_told(reachable: Path) -> None:
    reachable.chmod(0o700 if os.geteuid() == 0 else 0o000)
    refused(as_nobody("-l", str(reachable), "topics", "list"), "no_access", "rights")


def test_a_log_that_may_only_be_read_is_read(reachable: Path) -> None:
    for path in sorted(reachable.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    read = as_nobody("-l", str(reachable), "tail", "orders")
    assert (read.code, len(read.rows)) == (0, 3), read.err
    refused(as_nobody("-l", str(reachable), "topics", "create", "x"), "no_access")


def test_a_pipe_that_closes_early_ends_tail_quietly(orders: Cli) -> None:
    """`headwater tail | head -1`."""
    orders("produce", "orders", stdin='{"id":"x"}\n' * 20_000)
    pipe = f"{' '.join(COMMAND)} tail orders --from earliest | head -1"
    process = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True)
    assert json.loads(process.stdout)["id"] in {"o1", "o2", "o3"}
    assert process.stderr == ""


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the command line as a shell in the foreground would: Ctrl-C is not ignored, even where the tests ignore it."""
    command = ["env", "--default-signal=INT", *COMMAND, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_tail_follows_and_ends_quietly_with_ctrl_c(orders: Cli) -> None:
    process = start("tail", "orders", "-f", "-n", "1")
    assert process.stdout is not None
    process.stdout.readline()
    orders("produce", "orders", stdin='{"id":"new"}\n')
    assert json.loads(process.stdout.readline())["id"] == "new"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_ctrl_c_ends_a_question_that_takes_too_long(orders: Cli) -> None:
    process = start("sql", "select count(*) from range(1000000000) a, range(1000) b, orders")
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, b"")


def test_produce_follows_a_pipe_that_stays_open(orders: Cli) -> None:
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


def test_the_command_line_starts_quickly() -> None:
    """Nothing heavy is loaded before a command needs it."""
    script = "import sys, headwater.cli.main; print([m for m in ('pyarrow', 'duckdb', 'numpy', 'sqlglot') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"


def test_version_and_coverage(cli: Cli) -> None:
    assert cli("--version").out == f"headwater {hw.__version__}\n"
    assert json.loads(cli("coverage", "--json").out)
    assert "topics" in cli("--help").out


def test_the_example_runs(tmp_path: Path) -> None:
    example = [sys.executable, str(ROOT / "examples" / "orders.py"), str(tmp_path / "log")]
    process = subprocess.run(example, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "'o1': 'paid'" in process.stdout
