"""The events of a binlog by their bytes: also those that only MySQL writes, which no server of the tests does."""

from __future__ import annotations

import datetime
import socket
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal

import numpy as np
import pytest

from headwater.capture.mysql import binlog
from headwater.capture.mysql import stream as mysql_stream
from headwater.capture.mysql.binlog import MappedColumn
from headwater.capture.mysql.changes import BinlogDecoder
from headwater.capture.mysql.positions import BinlogPlace, begun_of, end_text, event_texts, gtids_of, place_of
from headwater.capture.mysql.stream import BinlogBlock, BinlogEvent
from headwater.capture.mysql.tables import CapturedMyTable, MyTable, info_of
from headwater.capture.mysql.types import Declared
from headwater.capture.mysql.values import layout_of, padded, read_values, walk

SOURCE = uuid.UUID("3e11fa47-71ca-11e1-9e33-c80aa9429562")


def test_positions_sort_as_the_binlog_goes_on() -> None:
    """Through offsets, files and events; the GTIDs that are reached stand before the events that follow, and can be left out."""
    ends = [
        end_text(BinlogPlace(1, 999)),
        end_text(BinlogPlace(1, 1000)),
        end_text(BinlogPlace(1, 1000), "0-1-7", 255),
        end_text(BinlogPlace(2, 4)),
    ]
    (event,) = event_texts(np.array([1]), np.array([1000]), np.array([1])).to_pylist()
    ordered = [*ends[:3], event, ends[3], end_text(BinlogPlace(16, 4)), end_text(BinlogPlace(16, 1 << 33))]
    assert ordered == sorted(ordered)
    assert (place_of(ends[2]), gtids_of(ends[2]), begun_of(ends[2])) == (BinlogPlace(1, 1000), "0-1-7", 255)
    assert (gtids_of(ends[1]), begun_of(ends[1])) == ("", 0)


class Sending:
    """A server that sends what a test says, and the connection to it."""

    shown = "mysql://here"

    def __init__(self) -> None:
        self.server, self._sock = socket.socketpair()

    def connect(self) -> Sending:
        return self

    @contextmanager
    def told(self) -> Iterator[None]:
        yield

    @contextmanager
    def cursor(self) -> Iterator[Sending]:
        yield self

    def execute(self, statement: str) -> None:
        assert statement.startswith("SET ")

    def _execute_command(self, *_: object) -> None:
        """It sends by itself."""

    def _force_close(self) -> None:
        self._sock.close()
        self.server.close()


@pytest.mark.slow
def test_an_event_of_several_packets_is_whole_wherever_it_is_cut_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all of its first packet has come, and nothing of the next, or half of its head."""
    monkeypatch.setattr(mysql_stream, "_PACKET_MAX", 0xFF)
    monkeypatch.setattr(mysql_stream, "BLOCK_BYTES_MAX", 16)
    body = bytes(range(250)) * 3
    event = b"\0" + binlog.HEADER.pack(0, binlog.QUERY, 1, 19 + len(body), 99, 0) + body
    pieces = [event[at : at + 0xFF] for at in range(0, len(event), 0xFF)]
    sent = b"".join(struct.pack("<I", len(piece) | number << 24) + piece for number, piece in enumerate(pieces))
    sending = Sending()
    stream = mysql_stream.BinlogStream(sending, file="log.000001", offset=4)  # type: ignore[arg-type]
    for cut in range(1, len(sent)):
        sending.server.sendall(sent[:cut])
        assert stream.read(0.0) is None, cut
        sending.server.sendall(sent[cut:])
        blocks = [found for _ in range(len(pieces) + 1) if (found := stream.read(0.0)) is not None]
        assert [block.data[one.start : one.stop] for block in blocks for one in block.events] == [body], cut
    stream.close()


def mysql_gtid(number: int, committed_us: int) -> bytes:
    times = committed_us.to_bytes(7, "little")
    return b"\x01" + SOURCE.bytes + struct.pack("<q", number) + b"\x02" + bytes(16) + times


def test_a_gtid_of_mysql_has_its_name_and_the_microsecond_of_its_commit() -> None:
    gtid = binlog.read_mysql_gtid(memoryview(mysql_gtid(23, 1_700_000_000_123_456)))
    assert (gtid.name, gtid.committed_us) == (f"{SOURCE}:23", 1_700_000_000_123_456)


TABLE_MAP = (
    (7).to_bytes(6, "little") + b"\x01\x00" + b"\x04shop\x00" + b"\x01t\x00"
    + b"\x03" + bytes([binlog.LONG, binlog.VARCHAR, binlog.JSON]) + b"\x03" + b"\x28\x00\x04" + b"\x06"
    + b"\x01\x01\x80" + b"\x02\x01\x2d" + b"\x04\x0a" + b"\x02id\x04name\x01d"
)  # fmt: skip


def test_a_table_map_names_its_columns() -> None:
    """Signs, collations and names come behind the types; the first column is unsigned."""
    mapped = binlog.read_table_map(memoryview(TABLE_MAP))
    assert (mapped.database, mapped.table, mapped.named) == ("shop", "t", True)
    assert [(column.name, column.type, column.unsigned, column.collation) for column in mapped.columns] == [
        ("id", binlog.LONG, True, 0),
        ("name", binlog.VARCHAR, False, 45),
        ("d", binlog.JSON, False, 0),
    ]


def test_a_transaction_of_mysql_is_read_as_one_of_mariadb_is() -> None:
    """GTID, BEGIN, table map, rows of the second version with bytes that nobody needs, XID."""
    # An object of one key: its count, size, the key's place and length, the value's type and itself, the key.
    document = b"\x00" + struct.pack("<HHHHBH", 1, 12, 11, 1, 5, 1) + b"a"
    image = b"\x00" + struct.pack("<I", 4_000_000_000) + b"\x03zo\x65" + struct.pack("<I", len(document)) + document
    rows = (7).to_bytes(6, "little") + b"\x01\x00" + b"\x05\x00" + b"xyz" + b"\x03" + b"\x07" + image
    query = struct.pack("<IIBHH", 1, 0, 4, 0, 0) + b"shop\0BEGIN"
    bodies = [
        (binlog.MYSQL_GTID, mysql_gtid(5, 1_700_000_000_000_001)),
        (binlog.QUERY, query),
        (binlog.TABLE_MAP, TABLE_MAP),
        (30, rows),
        (binlog.XID, struct.pack("<Q", 9)),
    ]
    data, events, end = b"", [], 200
    for kind, body in bodies:
        end += 19 + len(body)
        events.append(BinlogEvent(1_700_000_000, kind, 1, 19 + len(body), end, len(data), len(data) + len(body)))
        data += body
    columns = (
        Declared(name="id", type="int", full="int unsigned"),
        Declared(name="name", type="varchar", full="varchar(10)"),
        Declared(name="d", type="json", full="json"),
    )
    info = info_of(_table(columns), ("id",))
    decoder = BinlogDecoder(
        {"t": CapturedMyTable(info)},
        database="shop",
        codecs={45: "utf8"},
        look=lambda name: None,
        after=end_text(BinlogPlace(3, 200)),
    )
    (found,) = decoder.changes(BinlogBlock(data, events))
    (change,) = found.batches[0].changes.to_pylist()
    assert change["after"] == {"id": 4_000_000_000, "name": "zoe", "d": '{"a": 1}'}
    assert (change["op"], change["transaction"]) == ("c", f"{SOURCE}:5")
    assert change["committed"] == datetime.datetime(2023, 11, 14, 22, 13, 20, 1, tzinfo=datetime.UTC)
    assert (found.end, found.whole) == (end_text(BinlogPlace(3, end), f"{SOURCE}:5", 0), True)


def _table(columns: tuple[Declared, ...]) -> MyTable:
    return MyTable(
        database="shop", name="t", kind="BASE TABLE", engine="InnoDB", rows_estimate=0, row_bytes=0, columns=columns
    )


@pytest.mark.parametrize(
    ("precision", "scale", "octets", "value"),
    [
        (14, 4, "810dfb38d204d2", "1234567890.1234"),
        (14, 4, "7ef204c72dfb2d", "-1234567890.1234"),
        (1, 1, "85", "0.5"),
        (3, 0, "807b", "123"),
    ],
)
def test_decimals_are_words_of_nine_digits(precision: int, scale: int, octets: str, value: str) -> None:
    """The first two are the example of MySQL's own source."""
    column = MappedColumn("v", binlog.DECIMAL, precision, scale)
    data = b"\x00" + bytes.fromhex(octets)
    layout = layout_of(column)
    assert layout is not None and layout.width == len(bytes.fromhex(octets))
    walked = walk(padded(data), np.array([0]), np.array([len(data)]), [layout], images=1)
    assert read_values(column, walked.images[0][0], {}).to_pylist() == [Decimal(value)]


def test_rows_of_many_events_are_walked_over_in_step() -> None:
    """Events of different lengths, with nulls and texts between numbers: each row comes once, in the order of the data."""
    columns = [
        MappedColumn("a", binlog.TINY),
        MappedColumn("b", binlog.VARCHAR, 10, 0),
        MappedColumn("c", binlog.SHORT),
    ]
    wanted, data, starts, stops = [], b"", [], []
    for event in range(20):
        data += b"junk"
        starts.append(len(data))
        for row in range(event % 7):
            text = None if (event + row) % 3 == 0 else "x" * row
            wanted.append((event, row, text))
            null = 0b010 if text is None else 0
            data += bytes([null, row]) + (b"" if text is None else bytes([len(text)]) + text.encode())
            data += struct.pack("<h", event)
        stops.append(len(data))
    layouts = [layout for column in columns if (layout := layout_of(column))]
    walked = walk(padded(data), np.array(starts), np.array(stops), layouts, images=1)
    a, b, c = (
        read_values(column, found, {}).to_pylist() for column, found in zip(columns, walked.images[0], strict=True)
    )
    assert list(zip(c, a, b, strict=True)) == wanted
    assert walked.events.tolist() == c
