"""Where a capture of a binlog begins, and whether it can go on where it ended: the files that are there, and the GTIDs reached in them.

A position is found again if its file is there, was begun at the same second, is long enough, and had reached the same GTIDs at that byte: a
server that was restored, reset, or takes another's place is told from the one that was captured, also where both ran the same statements,
so that only the time differs. Functions only, no state.
"""

from __future__ import annotations

import time

from headwater.capture.mysql.binlog import FORMAT
from headwater.capture.mysql.connection import MySqlDatabase
from headwater.capture.mysql.positions import BinlogPlace, begun_of, end_text, file_number, gtids_of, place_of
from headwater.capture.mysql.requirements import MySqlServer
from headwater.capture.mysql.stream import BEGINS_OF_FILE, BinlogStream
from headwater.model.errors import CaptureLost, Unreachable

DESCRIPTION_S = 10.0

_AGAIN = "Start the capture with `--backfill-again`: it copies the tables again and removes deleted rows."


def end_of_binlog(database: MySqlDatabase, server: MySqlServer) -> tuple[str, BinlogPlace]:
    """Where the binlog ends now: the name of its file, and the place."""
    name, offset = database.ask(server.status)[0][:2]
    return name, BinlogPlace(file_number(name), int(offset))


def begin(database: MySqlDatabase, server: MySqlServer) -> str:
    """The position behind which a capture that begins now reads."""
    name, place = end_of_binlog(database, server)
    begun_s = _begun_s(database, name)
    if not server.is_mariadb:
        return end_text(place, "", begun_s)
    ((gtids,),) = database.ask("SELECT BINLOG_GTID_POS(%s, %s)", (name, place.offset))
    return end_text(place, _sorted(gtids or ""), begun_s)


def find(database: MySqlDatabase, server: MySqlServer, position: str) -> str:
    """The file that a position is in; `CaptureLost` where what comes behind it is gone."""
    place = place_of(position)
    files = {file_number(name): (name, int(size)) for name, size, *_ in database.ask("SHOW BINARY LOGS")}
    if place.file not in files:
        kept = ", ".join(name for name, _ in list(files.values())[:1]) or "none"
        raise CaptureLost(
            f"{database.shown}: The server has removed binlog {place.file}, which the capture still needs. Its first binlog is {kept}.",
            advice=f"{_AGAIN} To keep binlogs longer, run: SET GLOBAL binlog_expire_logs_seconds = 604800;",
        )
    name, size = files[place.file]
    gtids = gtids_of(position)
    is_same = begun_of(position) == _begun_s(database, name)
    if not is_same or place.offset > size or (gtids and not _is_reached(database, server, name, place, gtids)):
        raise CaptureLost(
            f"{database.shown}: {name} is not the binlog of the capture. It has another start time, or other "
            f"transactions than {gtids} up to byte {place.offset}.",
            advice=f"The server was restored, reset or replaced. {_AGAIN}",
        )
    return name


def bytes_behind(database: MySqlDatabase, place: BinlogPlace) -> int:
    """How many bytes of binlog stand behind a place."""
    files = [(file_number(name), int(size)) for name, size, *_ in database.ask("SHOW BINARY LOGS")]
    return sum(max(0, size - (place.offset if file == place.file else 0)) for file, size in files if file >= place.file)


def _begun_s(database: MySqlDatabase, file: str) -> int:
    """When a file was begun: its first event says so."""
    stream = BinlogStream(database, file=file, offset=BEGINS_OF_FILE)
    try:
        deadline = time.monotonic() + DESCRIPTION_S
        while time.monotonic() < deadline:
            for event in block.events if (block := stream.read(DESCRIPTION_S)) else ():
                if event.kind == FORMAT:
                    return event.time
    finally:
        stream.close()
    raise Unreachable(
        f"{database.shown}: The server did not send the start of {file}.",
        advice="Try again. If the error repeats, check the error log of the server.",
    )


def _is_reached(database: MySqlDatabase, server: MySqlServer, name: str, place: BinlogPlace, gtids: str) -> bool:
    if server.is_mariadb:
        ((there,),) = database.ask("SELECT BINLOG_GTID_POS(%s, %s)", (name, place.offset))
        return there is not None and _sorted(there) == gtids
    ((reached,),) = database.ask("SELECT GTID_SUBSET(%s, @@GLOBAL.gtid_executed)", (gtids,))
    return bool(reached)


def _sorted(gtids: str) -> str:
    return ",".join(sorted(gtid.strip() for gtid in gtids.split(",") if gtid.strip()))
