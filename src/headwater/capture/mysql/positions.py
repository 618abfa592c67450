"""Positions of MariaDB and MySQL: texts that sort as transactions were committed.

    0000002a:0000000004d2                  everything that stands before this byte of binlog.000042
    0000002a:0000000004d2+0-1-500@65dff425 the same, with the GTIDs that are reached there, and when the file was begun
    0000002a:0000000004d2/00000003         the third event of the transaction that begins at this byte

**Why not the GTID alone.** Of several domains (MariaDB) or servers (MySQL) each counts for itself, so GTIDs say nothing about which of two
transactions came first; the binlog does, and goes on through restarts with the next file. But another server has other files: what a
position was read from is recognised by its GTIDs and its time when a capture resumes (`resume_point`). `+` sorts before `/`, so a
transaction's events stand behind the end of the one before it. Functions and frozen data only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from headwater.capture.byte_columns import Indexes, fixed_texts, hexadecimal
from headwater.model.errors import InvalidInput

_FILE_WIDTH, _OFFSET_WIDTH, _ORDER_WIDTH = 8, 12, 8
_PLACE_WIDTH = _FILE_WIDTH + 1 + _OFFSET_WIDTH


class BinlogPlace(NamedTuple):
    """A byte of the binlog: the number of its file, and the offset in it."""

    file: int
    offset: int


def end_text(place: BinlogPlace, gtids: str | None = None, begun_s: int = 0) -> str:
    """A place as a position, with the GTIDs that are reached there, and when its file was begun."""
    bare = f"{place.file:0{_FILE_WIDTH}x}:{place.offset:0{_OFFSET_WIDTH}x}"
    return bare if gtids is None else f"{bare}+{gtids}@{begun_s:x}"


def place_of(position: str) -> BinlogPlace:
    """Where a position is."""
    return BinlogPlace(int(position[:_FILE_WIDTH], 16), int(position[_FILE_WIDTH + 1 : _PLACE_WIDTH], 16))


def gtids_of(position: str) -> str:
    """The GTIDs that are reached at a position."""
    return position[_PLACE_WIDTH + 1 :].partition("@")[0]


def begun_of(position: str) -> int:
    """When the file of a position was begun, in seconds since 1970; 0 where the position does not say."""
    return int(position.partition("@")[2] or "0", 16)


def file_number(name: str) -> int:
    """The number of a file of the binlog, by its name."""
    number = name.rpartition(".")[2]
    if not number.isdigit():
        raise InvalidInput(
            f"{name!r} is not the name of a binlog file.", advice="Binlog files have names such as binlog.000042."
        )
    return int(number)


def event_texts(files: Indexes, offsets: Indexes, orders: Indexes) -> pa.Array:
    """The positions of many events: where their transactions begin, and their order in these."""
    colon, slash = (np.full((len(files), 1), ord(mark), np.uint8) for mark in ":/")
    parts = [hexadecimal(files, _FILE_WIDTH), colon, hexadecimal(offsets, _OFFSET_WIDTH), slash]
    return fixed_texts(np.hstack([*parts, hexadecimal(orders, _ORDER_WIDTH)]))
