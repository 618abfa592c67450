"""A capture: brings the changes of one database into the log, each exactly once, whoever dies in between.

Everything that a step brings (changes of all tables, their history, begin and end of transactions, a chunk of a backfill) is one atomic
append of the stage `capture.<source>`, and the progress stands in its marker: a capture that was killed goes on with the next change.
Of two captures of one source the one that came later wins (`Fenced`). A step holds whole transactions of the source, many small ones
together; a large one is spilled until it is whole.

Invariant: for each key the topic's last event is the newest row that the database had at the progress' position.

What a table cannot follow (a column whose type became another, a key that is none) stops that table alone, with a sentence in the
progress; when the capture is next started the table is tried again, and copied anew.

Thread-safety: `run` and `step` belong to one thread; `status` and `progress` may be asked from any.
`remove_capture` leaves nothing of a capture in the database, and the log no longer goes on from where it was.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from headwater.capture.backfill import Copying
from headwater.capture.events import EventBatch, FewTopics
from headwater.capture.progress import STAGE, CaptureProgress, CaptureStatus, TableProgress, captures, progress_of
from headwater.capture.source import CaptureSource, Changes, SourceTable, TableChange
from headwater.capture.source_topics import CapturedTopics
from headwater.capture.source_url import open_source
from headwater.capture.spill import Spill
from headwater.capture.topics import HISTORY, live_keys
from headwater.log.clients.stage import Stage
from headwater.log.log import Log
from headwater.log.port.write import Write
from headwater.model.backoff import Backoff
from headwater.model.clock import Duration
from headwater.model.errors import CaptureLost, Closed, HeadwaterError, InvalidInput, NotCapturable, NotFound
from headwater.model.marker import Marker
from headwater.model.points import PROCESS

HEARTBEAT_S = 10.0
HISTORY_RETENTION = "7 days"
RETRY_S = (0.1, 30.0)
"""The first and the longest pause before a capture that failed is tried again."""

_LOOK_S = 0.2
_WAIT_FOR_CHUNK_S = 0.02
_QUIET_END_S = 2.0
"""How often a position is kept behind which nothing of interest came."""


class Capture:
    """One source and one log; see the module."""

    def __init__(
        self,
        log: Log,
        source: str | CaptureSource,
        *,
        tables: Sequence[str] = (),
        name: str | None = None,
        key: Mapping[str, Sequence[str]] | None = None,
        prefix: str = "",
        names: Mapping[str, str] | None = None,
        partitions: int = 4,
        retention: Duration | None = HISTORY_RETENTION,
        heartbeat_s: float = HEARTBEAT_S,
        backfill_again: bool = False,
    ) -> None:
        """`source` is a URL such as "sqlite:///shop.db"; then `tables` names the tables to capture (none: all of them), `name` what the
        log calls the source, and `key` the unique columns of tables without a primary key.

        A table's topic is called as `names` says, or as the table with `prefix` before it; `retention` is how long its history is kept,
        None for ever. With `backfill_again` a database that has forgotten changes, or is another one, is copied again over what the
        topics hold.
        """
        if not isinstance(source, str) and (tables or name or key):
            raise InvalidInput(
                "A source that is open already has its tables, its name and its keys.",
                advice="Give them with a URL only.",
            )
        self._log = log
        self.source = open_source(source, tables, name=name, key=key) if isinstance(source, str) else source
        self._topics = CapturedTopics(
            log, self.source.name, prefix=prefix, names=names or {}, partitions=partitions, retention=retention
        )
        self._heartbeat_s = heartbeat_s
        self._backfill_again = backfill_again
        self._stage: Stage | None = None
        self._epoch = -1
        self._tables: dict[str, SourceTable] = {}
        self._columns: dict[str, tuple[str, ...]] = {}
        self._copies: dict[str, Copying] = {}
        self._few: dict[str, FewTopics] = {}
        self._spill = Spill(_scratch(log, self.source.name))
        self._begun: EventBatch | None = None
        """A transaction whose end has not come yet."""
        self._kept_at = self._beat_at = time.monotonic()
        self._end = ""
        """How far changes were read; the progress' position is how far they were appended."""
        self._error: str | None = None
        self._state: str = "starting"
        self.progress = CaptureProgress(url=self.source.url, position="")
        self._kept = self.progress

    def __repr__(self) -> str:
        tables = {name: table.state for name, table in self.progress.tables.items()}
        name, url = self.source.name, self.source.url
        return f"Capture(name={name!r}, source={url!r}, log={self._log.url!r}, state={self._state!r}, tables={tables})"

    # Running

    def open(self) -> None:
        """Checks the source, makes the topics, and makes the database ready; earlier captures of this source are refused from now on."""
        infos = self.source.check()
        self._stage = self._log.stage(STAGE + self.source.name)
        last = self._stage.last
        known = progress_of(last)
        position = self._prepare(known, last)
        PROCESS.reach("capture: prepared")
        last = self._stage.last  # none any more where the source is copied anew
        self._epoch = -1 if last is None else last.epoch
        self._tables, self._copies = {}, {}
        tables = {
            info.name: self._begin(info, None if known is None or last is None else known.tables.get(info.name))
            for info in infos
        }
        if not self._tables:
            raise NotCapturable(
                f"Source {self.source.name!r} has no table that can be captured.", advice=_first_reason(tables)
            )
        PROCESS.reach("capture: topics made")
        floor = max(0 if known is None else known.committed_us, self._topics.reached_us(tables))
        self.progress = CaptureProgress(
            url=self.source.url,
            position=position,
            committed_us=floor,
            at_us=self._log.clock(),
            events=0 if known is None else known.events,
            tables=tables,
        )
        self._kept = CaptureProgress(url=self.source.url, position="") if last is None or known is None else known
        self._end, self._begun = position, None
        self._spill.clear()
        self._state, self._error = "live", None

    def step(self, *, timeout_s: float = _LOOK_S) -> bool:
        """Brings what there is, or waits so long for something to come; returns whether anything was read or appended."""
        if self._stage is None:
            raise Closed("The capture is not open.", advice="Call open() first.")
        copying = self._next_chunk()
        is_due = copying is not None and self._begun is None and copying.is_due(self._end)
        started_us = self._log.clock()
        found = self.source.changes(
            self._end, timeout_s=0.0 if is_due else timeout_s if copying is None else min(timeout_s, _WAIT_FOR_CHUNK_S)
        )
        PROCESS.reach("capture: changes read")
        if found is None and not is_due:
            return self._idle(started_us)
        batch = self._begun if self._begun is not None else self._new_batch()
        if found is not None:
            self._gather(found, batch)
        if found is not None and not found.whole:
            batch.spill()
            self._begun = batch
        else:
            self._append(batch)
        return True

    def catch_up(self) -> None:
        """Returns when all tables are copied and nothing more has come."""
        while self.step(timeout_s=0.0) or self._is_copying():
            pass

    def run(self, stop: threading.Event) -> None:
        """Captures until `stop` is set; what a retry can mend is tried again, ever more slowly."""
        backoff = Backoff(*RETRY_S)
        while not stop.is_set():
            try:
                if self._stage is None:
                    self.open()
                while not stop.is_set():
                    self.step()
                    backoff.reset()
            except Exception as error:
                retriable = isinstance(error, HeadwaterError) and error.retriable
                self._error = str(error) if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}"
                self._state = "waiting" if retriable else "failed"
                self.close()
                if not retriable:
                    raise
                backoff.wait(stop)
        self.close()
        self._state = "ended"

    def close(self) -> None:
        """Ends the source's connections; `open` goes on where it was."""
        self._stage, self._begun = None, None
        self._spill.clear()
        self.source.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def status(self) -> CaptureStatus:
        """How it is at this moment."""
        state = "copying" if self._state == "live" and self._is_copying() else self._state
        lag = None
        if state in ("live", "copying"):
            try:
                lag = self.source.lag()
            except HeadwaterError as error:
                self._error = str(error)
        return msgspec.convert(
            {"name": self.source.name, "state": state, "progress": self.progress, "lag": lag, "error": self._error},
            CaptureStatus,
            from_attributes=True,
        )

    # Parts of opening

    def _prepare(self, known: CaptureProgress | None, last: Marker | None) -> str:
        """The position to go on from; a database that is another one, or has forgotten something, is refused or begun anew."""
        assert self._stage is not None
        resume = None if known is None else known.position
        try:
            position = self.source.prepare(resume)
            if last is not None and last.query != self.source.identity:
                raise CaptureLost(
                    f"The log has a capture {self.source.name!r} of another database, or of an earlier version of this one.",
                    advice="Choose another name with --name. If this database replaces the other one, start with "
                    "--backfill-again: the capture then copies the tables again and removes deleted rows.",
                )
            return position
        except CaptureLost:
            if not self._backfill_again:
                raise
        position = self.source.prepare(None)
        self._stage.accept_new_checkpoint()
        return position

    def _begin(self, info: SourceTable, before: TableProgress | None) -> TableProgress:
        """How a table goes on that was so far when a capture last ended."""
        topic = self._topics.name(info.name)
        try:
            has_events = self._topics.make(info)
        except HeadwaterError as error:
            return TableProgress(topic=topic, state="stopped", why=str(error))
        self._know(info)
        if before is None:
            before = TableProgress(topic=topic, state="refreshing" if has_events else "copying")
        elif before.state in ("refreshing", "stopped") or _has_others(info, before):
            before = TableProgress(topic=topic, state="refreshing")
        if before.state != "live":
            self._copies[info.name] = Copying(info, refresh=before.state == "refreshing")
        return before

    # Parts of a step

    def _next_chunk(self) -> Copying | None:
        """The first of the tables that are to be copied, with a chunk to append."""
        while self._copies:
            name, copying = next(iter(self._copies.items()))
            if copying.held is not None:
                return copying
            if copying.refresh and copying.live is None:
                copying.live = live_keys(self._log, self._log.topic(self.progress.tables[name].topic))
            try:
                copying.hold(self.source.chunk(name, self.progress.tables[name].done, position=self._end))
            except NotCapturable as error:
                self._stop(name, str(error))
            PROCESS.reach("capture: chunk read")
        return None

    def _new_batch(self) -> EventBatch:
        return EventBatch(self._log, self.source.name, self.progress.committed_us, self._spill, self._few)

    def _gather(self, changes: Changes, batch: EventBatch) -> None:
        """Puts changes into the batch, and lets the tables follow."""
        for changed in changes.tables:
            self._follow(changed)
        for copying in self._copies.values():
            copying.see(changes)
        for name, why in batch.add(changes, self._tables, self.progress):
            self._stop(name, why)
        self._end = changes.end

    def _append(self, batch: EventBatch) -> None:
        """Appends everything with the progress it makes, in one step."""
        first = next(iter(self._copies.values()), None)
        if first is not None and first.is_due(self._end):
            self._copy(first, batch)
        self.progress = msgspec.structs.replace(
            self.progress,
            position=self._end,
            committed_us=batch.committed_us,
            at_us=self._log.clock(),
            events=self.progress.events + batch.events,
        )
        if batch or self._is_worth_keeping():
            self._commit(batch.writes())
        self._begun = None
        if self._spill:
            self._spill.clear()

    def _is_worth_keeping(self) -> bool:
        """Whether the progress says something new, though no event was read."""
        if self.progress.tables != self._kept.tables:
            return True
        return self.progress.position != self._kept.position and time.monotonic() - self._kept_at >= _QUIET_END_S

    def _commit(self, writes: list[Write]) -> None:
        assert self._stage is not None
        for name, table in self.progress.tables.items():
            if name in self._tables and table.columns != self._columns[name]:
                known = msgspec.structs.replace(table, columns=self._columns[name])
                self.progress = self.progress.with_table(name, known)
        marker = Marker(
            query=self.source.identity,
            epoch=self._epoch + 1,
            ends=msgspec.to_builtins(self.progress),
            stage=self._stage.name,
        )
        PROCESS.reach("capture: before append")
        self._stage.commit_writes(marker, writes)
        self._epoch += 1
        self._kept, self._kept_at = self.progress, time.monotonic()
        PROCESS.reach("capture: appended")
        self.source.confirm(self.progress.position)
        PROCESS.reach("capture: confirmed")

    def _copy(self, copying: Copying, batch: EventBatch) -> None:
        """Puts the chunk that is due behind the changes."""
        chunk, name = copying.held, copying.table.name
        assert chunk is not None
        table = self.progress.tables[name]
        why = batch.add_rows(copying.table, table.topic, copying.take(), position=chunk.until)
        if why is not None:
            self._stop(name, why)
            return
        after = msgspec.structs.replace(table, done=chunk.done, fraction=chunk.fraction)
        if chunk.last:
            gone = copying.gone()
            if gone is not None and len(gone):
                batch.remove(gone, copying.table, table.topic, position=chunk.until)
            after = TableProgress(topic=table.topic, state="live", columns=table.columns)
            del self._copies[name]
        self.progress = self.progress.with_table(name, after)

    def _follow(self, changed: TableChange) -> None:
        """Lets the topics of a table follow it, or stops the table."""
        info = changed.table
        table = self.progress.tables.get(info.name)
        if table is None:
            return
        if changed.error is not None:
            self._stop(info.name, changed.error)
            return
        if table.state == "stopped" and not changed.refresh:
            return
        try:
            self._topics.make(info)
        except HeadwaterError as error:
            self._stop(info.name, str(error))
            return
        self._know(info)
        if changed.refresh or table.state == "refreshing":
            self._copies.pop(info.name, None)
            self._copies[info.name] = Copying(info, refresh=True)
            self.progress = self.progress.with_table(info.name, TableProgress(topic=table.topic, state="refreshing"))
        elif info.name in self._copies:
            copying = self._copies[info.name]
            copying.table, copying.held = info, None

    def _know(self, info: SourceTable) -> None:
        self._tables[info.name], self._columns[info.name] = info, _columns(info)

    def _stop(self, name: str, why: str) -> None:
        table = self.progress.tables[name]
        self.progress = self.progress.with_table(name, TableProgress(topic=table.topic, state="stopped", why=why))
        self._copies.pop(name, None)

    def _idle(self, now_us: int) -> bool:
        """While nothing comes: the progress is kept, and now and then event time goes on, and the source is told so."""
        if self._begun is None and self._is_worth_keeping():
            self._append(self._new_batch())
            return True
        if time.monotonic() - self._beat_at >= self._heartbeat_s:
            self._beat_at = time.monotonic()
            self.source.heartbeat()
            if self._kept.position:  # not the progress' own: that may be ahead of what is in the log
                self.source.confirm(self._kept.position)
            if self._begun is None and not self._is_copying():
                self._topics.heartbeat(self.progress.tables, now_us)
                reached = max(now_us, self.progress.committed_us)
                self.progress = msgspec.structs.replace(self.progress, committed_us=reached)
        return False

    def _is_copying(self) -> bool:
        return any(table.state in ("copying", "refreshing") for table in self.progress.tables.values())


def remove_capture(
    log: Log, name: str, *, url: str | None = None, topics: bool = False, forget: bool = False
) -> list[str]:
    """Takes out of the database what the capture put there; with `topics` its topics go, too. Returns those.

    A capture that still runs is refused from now on, so it cannot make anything anew. With `forget` a database that cannot be
    reached is left as it is. `url` is for one that the log cannot reach by what it knows (a password is never kept).
    """
    progress = captures(log).get(name)
    if progress is None and url is None:
        raise NotFound(f"This log has no capture {name!r}.", advice="Pass the URL of its database as url=.")
    stage = log.stage(STAGE + name)
    tables = [] if progress is None else list(progress.tables)
    source = open_source(url or (progress.url if progress else ""), tables, name=name)
    try:
        source.remove()
    except HeadwaterError:
        if not forget:
            raise
    finally:
        source.close()
    stage.accept_new_checkpoint()
    if not topics or progress is None:
        return []
    known = [table.topic for table in progress.tables.values()]
    wanted = [*known, *(topic + HISTORY for topic in known), f"{name}.transactions", f"{name}.messages"]
    there = log.topics()
    gone = [topic for topic in wanted if topic in there]
    for topic in gone:
        log.delete_topic(topic)
    return gone


def _columns(info: SourceTable) -> tuple[str, ...]:
    return tuple(f"{field.name} {field.type}" for field in info.schema)


def _has_others(info: SourceTable, before: TableProgress) -> bool:
    """Whether a table has columns that what was captured of it does not know, and nobody tells of them."""
    return not info.is_told and bool(before.columns) and not set(_columns(info)) <= set(before.columns)


def _first_reason(tables: dict[str, TableProgress]) -> str:
    return next((table.why for table in tables.values() if table.why), "")


def _scratch(log: Log, name: str) -> Path:
    return Path(log.store.capabilities.folder or tempfile.gettempdir()) / "staged" / f"{STAGE}{name}"
