"""The stream of a server's binlog, as it sends it to a replica: blocks of events, as many as there are at a time.

PyMySQL shakes hands and asks for the stream; the packets behind that are cut here, because what waits for one packet cannot wait for a
moment only. The server is asked for a heartbeat while nothing happens, and one that is silent for longer is `Unreachable`. Not thread-safe.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Any, NamedTuple

from headwater.capture.mysql.binlog import FORMAT, HEADER, ROTATE
from headwater.capture.mysql.connection import MySqlDatabase
from headwater.model.errors import Unreachable

BLOCK_BYTES_MAX = 4 << 20
HEARTBEAT_S = 5
SILENCE_S = 60.0

_DUMP = 0x12
_CHECKSUM_BYTES, _CRC32 = 4, 1
_ROTATE_NAME_AT = 8
BEGINS_OF_FILE = 4
_OFFSET_MAX = (1 << 32) - 1
_ERROR, _END = 0xFF, 0xFE
_PACKET_MAX = 0xFFFFFF
_RECEIVED_AT_ONCE = 1 << 20
_HEAD = struct.Struct("<I")


class BinlogEvent(NamedTuple):
    """An event of a block: its header, and where its body stands in the block."""

    time: int
    kind: int
    server: int
    size: int
    end: int
    start: int
    stop: int


class BinlogBlock(NamedTuple):
    """Events, and the bytes that they stand in."""

    data: bytes
    events: list[BinlogEvent]


class BinlogStream:
    """One connection that reads the binlog from a byte of a file on."""

    def __init__(self, database: MySqlDatabase, *, file: str, offset: int) -> None:
        """A byte that the protocol cannot name is begun from the file's start; who reads skips what comes before."""
        self._database = database
        self._file = file
        self._checksum = 0
        """How many bytes behind each event are its checksum; the description of a file says so."""
        self._rest = b""
        self._heard = time.monotonic()
        self._connection = database.connect()
        period = HEARTBEAT_S * 1_000_000_000
        with database.told(), self._connection.cursor() as cursor:
            checksum = "@@global.binlog_checksum"
            cursor.execute(f"SET @master_binlog_checksum = {checksum}, @source_binlog_checksum = {checksum}")
            cursor.execute(f"SET @master_heartbeat_period = {period}, @source_heartbeat_period = {period}")
            cursor.execute("SET @mariadb_slave_capability = 4")
            begin = offset if offset <= _OFFSET_MAX else BEGINS_OF_FILE
            name = file.encode()
            server = secrets.randbits(31) | 1 << 31  # another replica with our number would end this one
            self._connection._execute_command(_DUMP, struct.pack("<IHI", begin, 0, server) + name)
        self._socket: socket.socket = self._connection._sock

    def read(self, timeout_s: float) -> BinlogBlock | None:
        """The events that have come, or those that come in time."""
        parts, size = [self._rest], len(self._rest)
        enough = max(BLOCK_BYTES_MAX, _end_of_first(self._rest))
        deadline = time.monotonic() + timeout_s
        while size < enough:
            got = self._receive(max(0.0, deadline - time.monotonic()) if len(parts) == 1 else 0.0)
            if not got:
                break
            parts.append(got)
            size += len(got)
        if len(parts) == 1:
            return None
        block, self._rest = self._cut(b"".join(parts))
        return block if block.events else None

    def close(self) -> None:
        """Ends the connection; the server notices at its next event."""
        with suppress(Exception):
            self._connection._force_close()

    def _receive(self, timeout_s: float) -> bytes:
        """What there is, or nothing."""
        try:
            self._socket.settimeout(max(timeout_s, 1e-6))
            got = self._socket.recv(_RECEIVED_AT_ONCE)
        except (TimeoutError, BlockingIOError):
            if time.monotonic() - self._heard > SILENCE_S:
                raise self._lost(f"the server sent nothing for {SILENCE_S:g} s") from None
            return b""
        except OSError as error:
            raise self._lost(str(error)) from None
        if not got:
            raise self._lost("the server closed the connection")
        self._heard = time.monotonic()
        return got

    def _cut(self, data: bytes) -> tuple[BinlogBlock, bytes]:
        """The whole events of what was received, and the rest."""
        events: list[BinlogEvent] = []
        at, size = 0, len(data)
        while at + 4 <= size:
            length = _HEAD.unpack_from(data, at)[0] & _PACKET_MAX
            end = at + 4 + length
            if length == _PACKET_MAX:  # an event of 16 MB or more goes on in the next packets
                joined = _joined(data, at)
                if joined is None:
                    break
                data = data[:at] + joined[0] + data[joined[1] :]
                size = len(data)
                end = at + len(joined[0])
            elif end > size:
                break
            first = data[at + 4]
            if first == _ERROR:
                number = int.from_bytes(data[at + 5 : at + 7], "little")
                raise self._database.problem(number, data[at + 13 : end].decode("utf8", "replace"))
            if first == _END and length < 9:
                raise self._lost("the server ended the stream")
            time_, kind, server, event_size, event_end, _ = HEADER.unpack_from(data, at + 5)
            start = at + 5 + HEADER.size
            if kind == FORMAT:
                self._checksum = _CHECKSUM_BYTES * (data[end - _CHECKSUM_BYTES - 1] == _CRC32)
            stop = end - (self._checksum_of_rotate(end - start) if kind == ROTATE else self._checksum)
            events.append(BinlogEvent(time_, kind, server, event_size, event_end, start, stop))
            at = end
        return BinlogBlock(data[:at] if at < size else data, events), data[at:]

    def _checksum_of_rotate(self, size: int) -> int:
        """One that the server makes up comes before the description of its file: its name is as long as ours, or by some digits longer."""
        return _CHECKSUM_BYTES if size - _ROTATE_NAME_AT >= len(self._file) + _CHECKSUM_BYTES else 0

    def _lost(self, why: str) -> Any:
        return Unreachable(
            f"{self._database.shown}: {why}.", advice="Check that the server runs and accepts connections."
        )


def _end_of_first(data: bytes) -> int:
    """Where the first event of what was received ends, or the head that says more: it may be cut into several packets."""
    at = 0
    while at + _HEAD.size <= len(data):
        length = _HEAD.unpack_from(data, at)[0] & _PACKET_MAX
        at += _HEAD.size + length
        if length < _PACKET_MAX:
            return at
    return at + _HEAD.size


def _joined(data: bytes, at: int) -> tuple[bytes, int] | None:
    """The packets that one event is cut into, as one with a head that nobody reads, and where the next begins; None: not all are here."""
    parts = [data[at : at + 4]]
    while at + 4 <= len(data):
        length = _HEAD.unpack_from(data, at)[0] & _PACKET_MAX
        if at + 4 + length > len(data):
            return None
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
        if length < _PACKET_MAX:
            return b"".join(parts), at
    return None
