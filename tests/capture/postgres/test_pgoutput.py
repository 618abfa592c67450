"""pgoutput taken apart, on messages made by hand and at random: each value where it belongs, against a decoder that reads byte by byte."""

from __future__ import annotations

import random
import struct
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.capture.postgres import stream as pg_stream
from headwater.capture.postgres.changes import FEW_MESSAGES, PgoutputDecoder
from headwater.capture.postgres.pgoutput import block_of, block_of_column, read_relation, rows_at, texts
from headwater.capture.postgres.positions import end_text, event_texts, lsn_of, lsn_sql
from headwater.capture.postgres.stream import SlotStream
from headwater.capture.postgres.tables import CapturedPgTable, PgColumn, PgTable
from headwater.capture.postgres.types import array_texts, composite_texts, elements, parts, type_of
from headwater.capture.source import SourceTable

TEXT, INT8 = 25, 20
UNCHANGED = object()


def begin(lsn: int, xid: int = 7) -> bytes:
    return b"B" + struct.pack(">QqI", lsn, 1_000_000, xid)


def commit(lsn: int, end: int) -> bytes:
    return b"C" + struct.pack(">BQQq", 0, lsn, end, 1_000_000)


def row(*values: Any) -> bytes:
    made = struct.pack(">H", len(values))
    for value in values:
        if value is None:
            made += b"n"
        elif value is UNCHANGED:
            made += b"u"
        else:
            made += b"t" + struct.pack(">I", len(value.encode())) + value.encode()
    return made


def insert(*values: Any, oid: int = 1) -> bytes:
    return b"I" + struct.pack(">I", oid) + b"N" + row(*values)


def update(*values: Any, old: tuple[bytes, tuple[Any, ...]] | None = None, oid: int = 1) -> bytes:
    before = b"" if old is None else old[0] + row(*old[1])
    return b"U" + struct.pack(">I", oid) + before + b"N" + row(*values)


def delete(*values: Any, oid: int = 1) -> bytes:
    return b"D" + struct.pack(">I", oid) + b"K" + row(*values)


def relation(oid: int = 1) -> bytes:
    columns = b"".join(
        struct.pack(">B", key) + name + b"\0" + struct.pack(">Ii", type_, -1)
        for key, name, type_ in ((1, b"id", INT8), (0, b"t", TEXT))
    )
    return b"R" + struct.pack(">I", oid) + b"public\0" + b"a%d\0" % oid + b"d" + struct.pack(">H", 2) + columns


class Nothing:
    """A database that has nothing to say, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def values(self, table: PgTable, keys: dict[str, pa.Array], columns: list[str]) -> dict[str, pa.Array]:
        found = {name: column.to_pylist() for name, column in keys.items()}
        self.asked.append((found, columns))
        return {name: pa.array([b"asked " + key for key in found["id"]], pa.binary()) for name in columns}

    def computed(self, table: PgTable, columns: dict[str, pa.Array], count: int) -> dict[str, pa.Array]:
        raise AssertionError("no column is generated")


class Plain:
    """Types without a catalog."""

    def of(self, oid: int, modifier: int) -> Any:
        return type_of(oid, modifier, {})


def decoder(*, after: int = 0, present: Nothing | None = None) -> PgoutputDecoder:
    captured = {}
    for oid in (1, 2):
        table = PgTable(
            oid=oid, namespace="public", name=f"a{oid}", kind="r", identity="d", persistence="p", rows_estimate=0, readable=True,
            owned=True, columns=(PgColumn("id", INT8, -1), PgColumn("t", TEXT, -1)),
        )  # fmt: skip
        schema = pa.schema([("id", pa.int64()), ("t", pa.string())])
        captured[oid] = CapturedPgTable(SourceTable(name=f"a{oid}", schema=schema, key=("id",)), table)
    return PgoutputDecoder(
        captured,
        types=Plain(),
        present=present or Nothing(),
        follow=lambda relation: None,
        after=after,
        xids=deque(),  # type: ignore[arg-type]
    )


def shown(changes: Any) -> list[tuple[Any, ...]]:
    """op, before, after, order of each event, by position."""
    rows = [row for batch in changes.batches for row in batch.changes.to_pylist()]
    pairs = {name: lambda value: value and (value["id"], value["t"]) for name in ("before", "after")}
    return [
        (row["op"], pairs["before"](row["before"]), pairs["after"](row["after"]), row["transaction_order"])
        for row in sorted(rows, key=lambda row: row["position"])
    ]


def test_a_transaction_as_it_is_sent() -> None:
    """Inserts, updates with and without the old key, deletes, in the order of the stream."""
    messages = [
        begin(0x50), relation(), insert("1", "one"), insert("2", None), update("1", "uno"),
        update("3", "uno", old=(b"K", ("1", None))), delete("2", None), commit(0x50, 0x60),
    ]  # fmt: skip
    (changes,) = decoder().changes(block_of(messages))
    assert shown(changes) == [
        ("c", None, (1, "one"), 1),
        ("c", None, (2, None), 2),
        ("u", None, (1, "uno"), 3),
        ("d", (1, None), None, 4),
        ("c", None, (3, "uno"), 5),
        ("d", (2, None), None, 6),
    ]
    assert changes.whole and changes.end == end_text(0x60)
    first, last = changes.transactions.to_pylist()
    assert (first["status"], first["events"]) == ("begin", None)
    assert (last["status"], last["events"], last["tables"]) == ("end", 6, [("a1", 6)])
    assert first["transaction"] == f"7:{end_text(0x50)}" and first["position"] < last["position"] < changes.end


def test_values_that_were_not_sent_are_found_along_the_chain_of_keys() -> None:
    """In the block where it has them, else the database is asked by the newest key that the block knows."""
    present = Nothing()
    messages = [
        begin(0x50), relation(), insert("1", "one"), update("1", UNCHANGED), update("2", UNCHANGED, old=(b"K", ("1", None))),
        update("2", UNCHANGED), update("8", UNCHANGED), update("9", UNCHANGED, old=(b"K", ("8", None))), update("5", UNCHANGED),
        insert("1", "anew"), update("1", UNCHANGED), commit(0x50, 0x60),
    ]  # fmt: skip
    (changes,) = decoder(present=present).changes(block_of(messages))
    after = [row for _, _, row, _ in shown(changes) if row]
    assert after == [
        (1, "one"), (1, "one"), (2, "one"), (2, "one"), (8, "asked 9"), (9, "asked 9"), (5, "asked 5"), (1, "anew"), (1, "anew"),
    ]  # fmt: skip
    assert present.asked == [({"id": [b"9", b"5"]}, ["t"])]


def test_values_that_were_not_sent_come_from_the_old_row() -> None:
    """Where the table sends it whole."""
    present = Nothing()
    messages = [begin(0x50), relation(), update("1", UNCHANGED, old=(b"O", ("1", "old"))), commit(0x50, 0x60)]
    (changes,) = decoder(present=present).changes(block_of(messages))
    assert shown(changes) == [("u", (1, "old"), (1, "old"), 1)] and not present.asked


def test_what_committed_before_is_left_out() -> None:
    """Whatever the server sends again."""
    messages = [
        begin(0x50),
        relation(),
        insert("1", "a"),
        commit(0x50, 0x60),
        begin(0x60),
        insert("2", "b"),
        commit(0x60, 0x70),
    ]
    (changes,) = decoder(after=0x60).changes(block_of(messages))
    assert shown(changes) == [("c", None, (2, "b"), 1)]
    assert [row["status"] for row in changes.transactions.to_pylist()] == ["begin", "end"]


def test_however_it_is_cut_the_events_are_the_same() -> None:
    """A stream of transactions over two tables, read in blocks of any length.

    Where one ends, what is given is whole, and the beginning of the next waits; where none ends all is given.
    """
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    random_ = random.Random(seed)
    messages, lsn = [], 0x100
    for number in range(60):
        messages.append(begin(lsn, number + 1))
        messages += [relation(1), relation(2)] if number == 0 else []
        for _ in range(random_.randrange(6)):
            oid, key = random_.choice([1, 2]), str(random_.randrange(5))
            made = [
                insert(key, "x" * random_.randrange(9), oid=oid),
                update(key, "y", oid=oid),
                delete(key, None, oid=oid),
            ]
            made += [update(key, "z", old=(b"K", (key + "0", None)), oid=oid), b"T" + struct.pack(">IBII", 2, 0, 1, 2)]
            messages.append(random_.choice(made))
        messages.append(commit(lsn, lsn + 0x20))
        lsn += 0x20
    (whole,) = decoder().changes(block_of(messages))
    cut, pieces, at = decoder(), [], 0
    waiting: list[bytes] = []
    while at < len(messages):
        block = messages[at : at + random_.randrange(1, 12)]
        at += len(block)
        (changes,) = cut.changes(block_of(block))
        kinds = b"".join(message[:1] for message in [*waiting, *block])
        waiting = [*waiting, *block][kinds.rfind(b"C") + 1 :] if b"C" in kinds else []
        assert changes.whole == cut.is_whole == (b"C" in kinds)
        assert cut.is_between == (kinds[-1:] == b"C")
        pieces.append(changes)
    assert [event for piece in pieces for event in by_position(piece)] == by_position(whole)
    ends = [row for piece in pieces if piece.transactions is not None for row in piece.transactions.to_pylist()]
    assert [{**row, "tables": dict(row["tables"] or ())} for row in ends] == [
        {**row, "tables": dict(row["tables"] or ())} for row in whole.transactions.to_pylist()
    ]
    positions = [event["position"] for event in by_position(whole)]
    assert len(set(positions)) == len(positions)


def test_a_few_messages_are_read_as_many_are() -> None:
    """A small transaction that is read message by message gives the very tables that it gives by columns."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    random_ = random.Random(seed)
    blocks, lsn, plain = [[begin(0x80), relation(1), relation(2), commit(0x80, 0x100)]], 0x100, 0
    for number in range(300):
        blocks.append([])
        is_plain = True
        for _ in range(random_.randrange(1, 3)):
            blocks[-1].append(begin(lsn, number + 1))
            for _ in range(random_.randrange(4)):
                oid, key, text = random_.choice([1, 2, 3]), str(random_.randrange(5)), random_.choice(["", "ä", None])
                made, by_columns = random_.choice(
                    [
                        (insert(key, text, oid=oid), False),
                        (insert(key, "\x80", oid=oid).replace("\x80".encode(), b"\xff\xfe"), False),
                        (update(key, text, oid=oid), False),
                        (update(key, text, old=(b"O", (key, "before")), oid=oid), False),
                        (delete(key, None, oid=oid), False),
                        (update(key, text, old=(b"O", (key + "0", "before")), oid=oid), True),
                        (update(key, text, old=(b"K", (key + "0", None)), oid=oid), True),
                        (update(key, UNCHANGED, oid=oid), True),
                    ]
                )
                blocks[-1].append(made)
                is_plain = is_plain and (not by_columns or oid == 3 or lsn < 0x200)
            blocks[-1].append(commit(lsn, lsn + 0x20))
            lsn += 0x20
        plain += is_plain
    one_by_one, by_columns, given = decoder(after=0x200), decoder(after=0x200), 0
    for messages in blocks:
        (found,) = one_by_one.changes(messages)
        (expected,) = by_columns.changes(block_of(messages))
        assert found == expected and one_by_one.end == by_columns.end
        given += one_by_one._few(messages) is not None
    assert given == plain
    seen = [set(np.concatenate(list(each._xids)).tolist()) for each in (one_by_one, by_columns)]
    assert seen[0] | {0} == seen[1]


def test_what_is_not_plain_or_not_whole_is_read_by_columns() -> None:
    """A table that is described, what applications emit, a truncation, a transaction without its end, and more than a few."""
    known = decoder()
    list(known.changes(block_of([begin(0x50), relation(), commit(0x50, 0x60)])))
    row = insert("1", "a")
    emitted = b"M" + struct.pack(">BQ", 1, 0x60) + b"prefix\0" + struct.pack(">I", 0)
    for special in (relation(), emitted, b"T" + struct.pack(">IBI", 1, 0, 1)):
        assert known._few([begin(0x60), row, special, commit(0x60, 0x70)]) is None
    assert known._few([begin(0x60), row]) is None
    assert known._few([row, commit(0x60, 0x70)]) is None
    assert known._few([begin(0x60), *[row] * FEW_MESSAGES, commit(0x60, 0x70)]) is None
    assert known._few([begin(0x60), row, commit(0x60, 0x70)]) is not None


def test_a_transaction_is_not_read_in_parts_because_it_came_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends each message by itself; what it has begun it ends at once, and parts would have to be read by columns."""
    whole = [begin(0x60), insert("1", "a"), commit(0x60, 0x70)]
    coming: list[bytes | None] = [None, whole[0], None, None, whole[1], None, whole[2], None, begin(0x80)]

    class Cursor:
        def read_message(self) -> Any:
            payload = coming.pop(0)
            return None if payload is None else SimpleNamespace(payload=payload)

    stream = SlotStream.__new__(SlotStream)
    stream._cursor, stream._connection, stream._told_s, stream._is_open = Cursor(), None, time.monotonic(), False
    monkeypatch.setattr(pg_stream, "is_readable", lambda connection, timeout_s: timeout_s > 0)
    assert stream._messages(1.0) == whole and len(coming) == 1


def by_position(changes: Any) -> list[dict[str, Any]]:
    rows = [{**row, "table": batch.table} for batch in changes.batches for row in batch.changes.to_pylist()]
    return sorted(rows, key=lambda row: row["position"])


@given(st.lists(st.tuples(st.none() | st.text(max_size=30), st.none() | st.text(max_size=5)), max_size=20))
def test_rows_are_walked_column_by_column(rows: list[tuple[str | None, str | None]]) -> None:
    """Nulls and texts of any length and any bytes."""
    messages = [insert(*values) for values in rows]
    for block in (block_of(messages), block_of_column(pa.array(messages, pa.binary()))):
        found = rows_at(block.data, block.starts + 6, 2)
        for at in range(2):
            expected = [None if values[at] is None else (values[at] or "").encode() for values in rows]
            assert texts(block.data, found, at).to_pylist() == expected


def test_a_relation_is_read() -> None:
    """Names, types and what identifies a row."""
    read = read_relation(memoryview(relation(9)))
    assert (read.oid, read.namespace, read.name, read.identity) == (9, "public", "a9", "d")
    assert [(column.name, column.type, column.key) for column in read.columns] == [
        ("id", INT8, True),
        ("t", TEXT, False),
    ]


def test_positions_sort_as_transactions_committed() -> None:
    """As text: an end lies between the events before it and those behind it."""
    lsns = [0x10, 0x10, 0xFFFF_FFFF, 1 << 40]
    made = event_texts(np.array(lsns), np.array([1, 0xFFFF_FFFF, 2, 3])).to_pylist()
    assert made == sorted(made) and made[0] == f"{end_text(0x10)}/00000001"
    assert end_text(0x10) < made[0] < end_text(0x11) and lsn_of(made[3]) == 1 << 40
    assert lsn_sql(0x1_0000_00AB) == "1/AB"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", []),
        ("{1,2}", ["1", "2"]),
        ('{NULL,"NULL",a b}', [None, "NULL", "a b"]),
        (r'{"a\"b","c\\d",""}', ['a"b', "c\\d", ""]),
        ("{{1,2},{3,NULL}}", ["1", "2", "3", None]),
        ("[0:1]={7,8}", ["7", "8"]),
    ],
)
def test_arrays_are_taken_apart(text: str, expected: list[str | None]) -> None:
    """Alone, and in a column with a null and an empty one."""
    assert elements(text) == expected
    values, offsets = array_texts(pa.array([text, None, "{}", "{5}"]))
    assert values.to_pylist() == [*expected, "5"]
    assert offsets.tolist() == [0, len(expected), len(expected), len(expected), len(expected) + 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(1,x)", ["1", "x"]),
        ("(,)", [None, None]),
        (r'("a""b","c\\d")', ['a"b', "c\\d"]),
        ('("(1,2)","")', ["(1,2)", ""]),
    ],
)
def test_composites_are_taken_apart(text: str, expected: list[str | None]) -> None:
    """Parts that a type got later are null, those that it lost are left out."""
    assert parts(text) == expected
    assert [part.to_pylist() for part in composite_texts(pa.array([text, None]), 3)] == [
        [value, None] for value in [*expected, None]
    ]


@pytest.mark.parametrize(
    ("oid", "modifier", "texts"),
    [
        (16, -1, ["t", "f"]),
        (17, -1, ["\\x", "\\x00ff"]),
        (20, -1, ["0", "-9223372036854775808", "9223372036854775807"]),
        (21, -1, ["-32768", "32767"]),
        (23, -1, ["-2147483648", "7"]),
        (26, -1, ["4294967295"]),
        (700, -1, ["0.1", "16777217", "1e-45", "NaN", "Infinity", "-Infinity"]),
        (701, -1, ["0.1", "1e-300", "5e-324", "1.7976931348623157e+308", "-0", "Infinity", "-Infinity"]),
        (1082, -1, ["2026-02-28", "infinity", "0044-03-15 BC", "0001-01-01", "9999-12-31", "10000-01-01"]),
        (1114, -1, ["2026-02-28 12:00:00.5", "-infinity", "10000-01-01 00:00:00", "0044-03-15 12:00:00 BC"]),
        (
            1184,
            -1,
            ["2026-02-28 12:00:00.000001+00", "infinity", "1969-12-31 23:59:59.99+00", "9999-12-31 23:59:59.999999+00"],
        ),
        (1700, (10 << 16 | 2) + 4, ["12345678.90", "-0.01", "NaN"]),
        (1700, -1, ["1e400", "NaN"]),
        (25, -1, ["", "ä", "t"]),
    ],
)
def test_one_value_is_read_as_a_column_of_them_is(oid: int, modifier: int, texts: list[str]) -> None:
    """Of every plain type, its ends too; inside a struct, as the row of a change is."""
    type_ = type_of(oid, modifier, {})
    event = pa.struct([pa.field("value", type_.arrow)])
    read = pa.array([(type_.from_one(text),) for text in texts], event).field("value")
    expected = type_.from_text(pa.array(texts, pa.string()))
    assert read.type == expected.type and repr(read.to_pylist()) == repr(expected.to_pylist())  # NaN is not NaN
