"""Blocks of a binlog's events as `Changes`: transactions whole and in commit order, every event with its position.

Invariants:
- the events of a transaction are numbered from 1 in the order of the binlog, over all captured tables; a change of a key takes two numbers;
- a transaction that begins before the position where reading began is left out, whatever the server sends;
- rows are read by the columns that the binlog gives the table there (`binlog.TableMap`), and shown in those that the runner knows, as
  long as these hold them. Where they do not, and where a statement changes a table, the block is cut: the table's new form comes first;
- what a statement makes of rows is not in the binlog: the table is copied again then (`ddl`). So it is for XA transactions, whose
  rows stand where they were prepared, not where they were committed, and for statements that a session logged instead of rows.

One `BinlogDecoder` serves one stream. Not thread-safe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec
import pyarrow as pa

from headwater.capture.mysql import binlog
from headwater.capture.mysql.binlog import TableMap
from headwater.capture.mysql.binlog_segment import BinlogSegment, BinlogTransaction
from headwater.capture.mysql.ddl import effects
from headwater.capture.mysql.positions import BinlogPlace, begun_of, end_text, file_number, gtids_of, place_of
from headwater.capture.mysql.stream import BinlogBlock, BinlogEvent
from headwater.capture.mysql.tables import CapturedMyTable, MyTable, info_of, key_of
from headwater.capture.mysql.types import mapped_type
from headwater.capture.mysql.values import layout_of
from headwater.capture.source import Changes, SourceTable, TableChange
from headwater.model.errors import CaptureLost, NotCapturable, SchemaConflict
from headwater.model.schema import widen

TABLE_MAPS_MAX = 4096
XA_MAX = 1024

_OFFSET_BITS = 32
_XA = re.compile(r"XA\s+(\w+)\s+([^,]*,[^,]*,\s*\d+|\S+)", re.IGNORECASE)
_ENDS = ("COMMIT", "ROLLBACK")
_SILENT = ("SAVEPOINT", "ROLLBACK TO", "RELEASE SAVEPOINT")

Look = Callable[[str], MyTable | None]
"""A table as the catalog has it now."""


class BinlogDecoder:
    """Follows one stream. `captured` is by the name of the table, and is changed where a table changes or stops."""

    def __init__(
        self,
        captured: dict[str, CapturedMyTable],
        *,
        database: str,
        codecs: dict[int, str],
        look: Look,
        after: str,
        folds_names: bool = False,
    ) -> None:
        self._captured = captured
        self._database = database
        self._codecs = codecs
        self._look = look
        self._folds_names = folds_names
        self._after = place_of(after)
        self._gtids = {gtid.partition("-")[0]: gtid for gtid in gtids_of(after).split(",") if "-" in gtid}
        self._begun_s = begun_of(after)
        self._maps: dict[int, TableMap | None] = {}
        self._parsed: dict[bytes, TableMap] = {}
        self._fitting: dict[str, tuple[TableMap, CapturedMyTable]] = {}
        self._prepared: dict[str, set[str]] = {}
        self._open: BinlogTransaction | None = None
        self._is_over = False
        """Whether the open transaction ends once what its last event changed has been told: not before, or a kill could lose that."""
        self._news: list[tuple[TableChange, CapturedMyTable | None]] = []
        self._told: list[TableChange] = []
        """Tables that look different before the next piece."""
        self._segment = BinlogSegment(self._codecs)
        self.place = self._after
        """How far the binlog was read; part of a transaction may lie before it."""
        self.end = after
        """Everything up to this position was given."""
        self.committed_us = 0

    @property
    def is_whole(self) -> bool:
        """Whether no transaction is open of which something was given."""
        return self._open is None or not self._open.given

    def changes(self, block: BinlogBlock) -> Iterator[Changes]:
        """What the events of a block say; a new piece where a table changes."""
        view = memoryview(block.data)
        for event in block.events:
            body = view[event.start : event.stop]
            begin = self.place
            self._advance(event, body)
            if event.kind in binlog.ROWS:
                self._add_rows(event, body)
            elif event.kind == binlog.TABLE_MAP:
                self._see_table(body)
            elif event.kind in (binlog.MARIADB_GTID, binlog.MYSQL_GTID):
                self._begin(event, body, begin)
            elif event.kind == binlog.XID:
                self._commit()
            elif event.kind == binlog.QUERY:
                self._query(binlog.read_query(body))
            elif event.kind == binlog.XA_PREPARE:
                self._end_prepared(one_phase=bool(body[0]))
            else:
                _refuse(event.kind)
            if self._news:
                if self._segment or self._told:
                    yield self._flush(block)
                self._apply_news()
            if self._is_over:
                self._commit()
        if self._segment or self._told or self._end_now() != self.end:
            yield self._flush(block)
        self._restart_segment()

    def _advance(self, event: BinlogEvent, body: memoryview) -> None:
        """Where the event ends: headers have 32 bits of it, and events that the server makes up have none."""
        if event.kind == binlog.ROTATE:
            offset, name = binlog.read_rotate(body)
            self.place = BinlogPlace(file_number(name), offset)
        elif event.end and event.kind not in (binlog.HEARTBEAT, binlog.HEARTBEAT_V2):
            offset = self.place.offset >> _OFFSET_BITS << _OFFSET_BITS | event.end
            offset += (1 << _OFFSET_BITS) * (offset < self.place.offset)
            self.place = BinlogPlace(self.place.file, offset)
            if event.kind == binlog.FORMAT:
                self._begun_s = event.time

    def _begin(self, event: BinlogEvent, body: memoryview, place: BinlogPlace) -> None:
        is_mariadb = event.kind == binlog.MARIADB_GTID
        gtid = binlog.read_mariadb_gtid(body, event.server) if is_mariadb else binlog.read_mysql_gtid(body)
        self._open = BinlogTransaction(
            place=place,
            committed_us=gtid.committed_us or event.time * 1_000_000,
            name=gtid.name,
            stream=gtid.stream,
            began=is_mariadb and not gtid.flags & binlog.STANDALONE,
            wanted=place >= self._after,
            completes=gtid.xa,
        )
        if gtid.flags & binlog.PREPARED:
            self._prepare(self._open, gtid.xa)
        self._segment.begin(self._open)

    def _commit(self) -> None:
        if self._open is not None:
            self._gtids[self._open.stream] = self._open.name
            self.committed_us = self._open.committed_us
            self._segment.commit()
            self._open = None
        self._is_over = False

    def _see_table(self, body: memoryview) -> None:
        """A table map: of a captured table it must fit what the runner knows."""
        number = binlog.table_number(body)
        described = bytes(body[6:])
        mapped = self._parsed.get(described)
        if mapped is None:
            if len(self._parsed) >= TABLE_MAPS_MAX:
                self._parsed.clear()
            mapped = self._parsed[described] = binlog.read_table_map(body)
        known = self._captured.get(mapped.table) if mapped.database == self._database else None
        self._maps[number] = None if known is None else mapped
        if known is None or self._open is None or not self._open.wanted:
            return
        fits = self._fitting.get(mapped.table)
        if fits is None or fits[0] is not mapped or fits[1] is not known:
            self._fit(mapped, known)

    def _fit(self, mapped: TableMap, known: CapturedMyTable) -> None:
        """Lets the runner know columns that it does not, and stops a table whose rows cannot be read."""
        info = known.info
        if not mapped.named:
            self._stop(
                info,
                "was written to the binlog without column names. Run: SET GLOBAL binlog_row_metadata = FULL;",
            )
            return
        types = {column.name: mapped_type(column) if layout_of(column) else None for column in mapped.columns}
        strange = [name for name, arrow in types.items() if arrow is None]
        if strange:
            self._stop(
                info,
                f"has a column {strange[0]!r} of a type that cannot be captured. Rewrite the table: ALTER TABLE … FORCE;",
            )
            return
        gone = [name for name in info.key if name not in types]
        if gone:
            self._stop(
                info,
                f"lacks the key column {gone[0]!r} at this point of the binlog. Remove the capture, and capture the table again.",
            )
            return
        fields = {field.name: field for field in info.schema}
        for name, arrow in types.items():
            if name not in fields or not _holds(fields[name].type, arrow):
                fields[name] = pa.field(name, arrow)
        schema = pa.schema(list(fields.values()))
        fitting = known
        if schema != info.schema:
            fitting = CapturedMyTable(msgspec.structs.replace(info, schema=schema), known.given)
            self._news.append((TableChange(table=fitting.info), fitting))
        self._fitting[mapped.table] = (mapped, fitting)

    def _add_rows(self, event: BinlogEvent, body: memoryview) -> None:
        mapped = self._maps.get(binlog.table_number(body))
        transaction = self._open
        if mapped is None or transaction is None or not transaction.wanted or mapped.table not in self._captured:
            return
        if transaction.xa is not None:
            self._prepared[transaction.xa].add(mapped.table)
            return
        header = binlog.read_rows_header(body, event.kind)
        if not header.whole or header.columns != len(mapped.columns):
            why = "was written by a session without binlog_row_image = FULL. Run: SET GLOBAL binlog_row_image = FULL;"
            self._stop(self._captured[mapped.table].info, why)
            return
        self._segment.add(mapped.table, mapped, event.kind, event.start + header.begin, event.stop)

    def _query(self, query: binlog.BinlogQuery) -> None:
        """A statement: the begin or end of a transaction, or something that happened to tables."""
        transaction, statement = self._open, query.statement.strip()
        word = statement[:12].upper()
        if transaction is None or word.startswith(_SILENT):
            return
        if word.startswith("XA "):
            self._xa(transaction, statement)
            return
        if word.startswith(("BEGIN", "START TRANS")):
            transaction.began = True
            return
        if word.startswith(_ENDS):
            self._is_over = True
            return
        if transaction.wanted:
            self._see_statement(query)
        self._is_over = not transaction.began

    def _see_statement(self, query: binlog.BinlogQuery) -> None:
        seen: set[str] = set()
        for effect in effects(query.statement, query.database, list(self._captured)):
            known = self._known(effect.table)
            if not self._is_same(effect.database, self._database) or known is None or known.info.name in seen:
                continue
            seen.add(known.info.name)
            if effect.doing == "truncated":
                self._segment.truncate(known.info.name)
            else:
                self._look_again(known, gone=effect.doing == "gone", refresh=effect.doing != "altered")

    def _known(self, table: str) -> CapturedMyTable | None:
        """The captured table that a statement means."""
        return next((known for name, known in self._captured.items() if self._is_same(name, table)), None)

    def _is_same(self, name: str, other: str) -> bool:
        return name.lower() == other.lower() if self._folds_names else name == other

    def _look_again(self, known: CapturedMyTable, *, gone: bool, refresh: bool) -> None:
        """A table that a statement has changed, as the catalog has it now; what comes after that moment will be told again."""
        info = known.info
        table = self._look(info.name)
        if table is None:
            if gone:
                self._stop(info, "was dropped in the database. Remove the table from the capture. Its topics stay.")
            return
        try:
            key = key_of(table, known.given)
        except NotCapturable as error:
            self._news.append((TableChange(table=info, error=str(error)), None))
            return
        if key != info.key:
            self._stop(
                info,
                f"changed its key from ({', '.join(info.key)}) to ({', '.join(key)}). The key of a topic cannot "
                "change: remove the capture, delete its topics, and capture the table again.",
            )
            return
        seen = CapturedMyTable(info_of(table, key), known.given)
        if refresh or seen.info.schema != info.schema:
            self._news.append((TableChange(table=seen.info, refresh=refresh), seen))

    def _xa(self, transaction: BinlogTransaction, statement: str) -> None:
        """Rows of an XA transaction count when it is committed, which may be much later, or never."""
        found = _XA.match(statement)
        word, name = (found[1].upper(), re.sub(r"\s", "", found[2])) if found else ("", "")
        if word in ("START", "BEGIN"):
            transaction.began = True
            self._prepare(transaction, name)
        elif word in ("COMMIT", "ROLLBACK"):
            touched = self._prepared.pop(transaction.completes or name, None)
            if word == "COMMIT" and transaction.wanted:
                self._refresh(set(self._captured) if touched is None else touched)
            self._is_over = True
        elif word == "PREPARE":
            self._end_prepared(one_phase=False)

    def _prepare(self, transaction: BinlogTransaction, name: str) -> None:
        if len(self._prepared) >= XA_MAX:  # one that is not known is taken to have touched everything
            self._prepared.clear()
        transaction.xa = name
        self._prepared[name] = set()

    def _end_prepared(self, *, one_phase: bool) -> None:
        if one_phase and self._open is not None and self._open.xa is not None:
            self._refresh(self._prepared.pop(self._open.xa, set()))
        self._is_over = True

    def _refresh(self, tables: set[str]) -> None:
        for table in sorted(tables & set(self._captured)):
            known = self._captured[table]
            self._news.append((TableChange(table=known.info, refresh=True), known))

    def _stop(self, info: SourceTable, why: str) -> None:
        self._news.append((TableChange(table=info, error=f"Table {info.name} {why}"), None))

    def _apply_news(self) -> None:
        for change, captured in self._news:
            self._told.append(change)
            if captured is None:
                self._captured.pop(change.table.name, None)
            else:
                self._captured[change.table.name] = captured
        self._news.clear()

    def _end_now(self) -> str:
        if not self.is_whole:
            return self.end
        place = self.place if self._open is None else self._open.place
        gtids = ",".join(sorted(self._gtids.values()))
        return end_text(place, gtids, self._begun_s) if place >= self._after else self.end

    def _flush(self, block: BinlogBlock) -> Changes:
        """What was gathered since the last piece."""
        batches, transactions = self._segment.changes(block.data, self._captured)
        self.end = self._end_now()
        tables, self._told = tuple(self._told), []
        self._restart_segment()
        return Changes(batches=batches, transactions=transactions, tables=tables, end=self.end, whole=self.is_whole)

    def _restart_segment(self) -> None:
        self._segment = BinlogSegment(self._codecs)
        if self._open is not None:
            self._segment.begin(self._open)


def _holds(known: pa.DataType, arrow: pa.DataType) -> bool:
    """Whether a type of the log holds all values of another."""
    try:
        return widen(pa.schema([pa.field("v", arrow)]), pa.schema([pa.field("v", known)])).field("v").type == known
    except SchemaConflict:
        return False


def _refuse(kind: int) -> None:
    """Events that nobody here can read must not be passed over."""
    if kind == binlog.INCIDENT:
        raise CaptureLost(
            "The binlog of the server lacks events, because of an incident.",
            advice="Start the capture with `--backfill-again`: it copies the tables again.",
        )
    if kind in (binlog.PARTIAL_UPDATE, binlog.PAYLOAD, binlog.MYSQL_GTID_TAGGED) or kind in binlog.COMPRESSED:
        raise NotCapturable(
            f"The binlog has events of kind {kind}, which a capture does not support: compressed, partial, or with tagged GTIDs.",
            advice="Run: SET GLOBAL log_bin_compress = OFF; (MariaDB) or SET GLOBAL binlog_transaction_compression = OFF; SET GLOBAL "
            "binlog_row_value_options = ''; (MySQL), and start the capture with `--backfill-again`.",
        )
