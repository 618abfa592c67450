"""An export: the history of a captured table, kept written to a topic in Debezium's envelope, each change exactly once.

    DebeziumExport(log, "users.changes", to=hw.open_log("kafka://host:9092"), topic="shop.users").run(stop)

The changes of a step and how far it has come are one commit of the stage `export.<topic>` in the log that they go to: an export that was
killed goes on with the next change, and of two the later one wins. A step takes changes of all partitions in the order in which the
database committed them; so a topic with one partition has them all in this order, one with more has it for each key.

Not thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from headwater.log.clients.stage import Stage
from headwater.log.log import Log
from headwater.model.backoff import Backoff
from headwater.model.errors import Closed, HeadwaterError, InvalidInput
from headwater.model.marker import Marker
from headwater.model.points import PROCESS
from headwater.sinks.debezium_envelope import COLUMNS, HISTORY, EnvelopeWriter

EVENTS_MAX = 50_000
STAGE = "export."

_LOOK_S = 0.02
_RETRY_S = (0.1, 30.0)
"""The first and the longest pause before another attempt."""

_PLACE = ("_partition", "_offset")
_ORDER = ("committed", "position", *_PLACE)


class DebeziumExport:
    """One table's history and the topic that it is written to; see the module."""

    def __init__(
        self,
        log: Log,
        history: str,
        *,
        to: Log,
        topic: str,
        key: Sequence[str] = (),
        partitions: int = 1,
        schemas: bool = True,
        tombstones: bool = True,
    ) -> None:
        """`key` are the columns of a primary key that has several, in its order. `partitions` are those of a topic that is made.

        Without `schemas` an event is the payload alone; without `tombstones` none follow deletes.
        """
        described = log.topic(history)
        table = history.removesuffix(HISTORY)
        if described.key is None or (described.key == "primary_key" and not key):
            raise InvalidInput(
                f"The key of table {table!r} has several columns, which the log stores as one text.",
                advice="Pass the key columns in their order: --key a,b, or key=['a', 'b'] in Python.",
            )
        server, _, name = topic.rpartition(".")
        self._writer = EnvelopeWriter(
            described.schema,
            key_column=described.key,
            key=key or (described.key,),
            table=name,
            server=server or name,
            schemas=schemas,
        )
        self._log, self._history, self._to, self.topic = log, history, to, topic
        self._columns = [*dict.fromkeys([described.key, *COLUMNS]), *_PLACE]
        self._partitions, self._tombstones = partitions, tombstones
        self._query = described.id
        self._stage: Stage | None = None
        self._epoch = -1
        self.places: dict[int, int] = {}
        """How far each partition of the history was written."""
        self.changes = 0

    def __repr__(self) -> str:
        state = "not open" if self._stage is None else "open"
        return f"DebeziumExport(history={self._history!r}, topic={self.topic!r}, to={self._to.url!r}, changes={self.changes}, {state})"

    def open(self) -> None:
        """Makes the topic, and finds how far it was written; earlier exports to it are refused from now on."""
        if self.topic not in self._to.topics():
            self._to.create_topic(self.topic, partitions=self._partitions, exist_ok=True)
        self._stage = self._to.stage(STAGE + self.topic)
        last = self._stage.last
        spans = self._log.offsets(self._history)
        self._epoch = -1 if last is None else last.epoch
        known = {} if last is None else {int(partition): offset for partition, offset in last.ends.items()}
        self.places = {partition: known.get(partition, span.start) for partition, span in spans.items()}

    def step(self) -> bool:
        """Writes what there is, up to some; returns whether there was anything."""
        if self._stage is None:
            raise Closed("The export is not open.", advice="Call open() first.")
        changes, places = self._read()
        if places == self.places:
            return False
        PROCESS.reach("export: read")
        ends = {str(partition): offset for partition, offset in places.items()}
        marker = Marker(query=self._query, epoch=self._epoch + 1, ends=ends)
        events = self._writer.events(changes, tombstones=self._tombstones) if changes.num_rows else None
        PROCESS.reach("export: before append")
        self._stage.commit(marker, [] if events is None else [(self.topic, events)])
        PROCESS.reach("export: appended")
        self._epoch, self.places = self._epoch + 1, places
        self.changes += changes.num_rows
        return True

    def catch_up(self) -> None:
        """Returns when everything that is there is written."""
        while self.step():
            pass

    def run(self, stop: threading.Event) -> None:
        """Exports until `stop` is set; what a retry can mend is tried again, ever more slowly."""
        backoff = Backoff(*_RETRY_S)
        while not stop.is_set():
            try:
                if self._stage is None:
                    self.open()
                while not stop.is_set():
                    if not self.step():
                        stop.wait(_LOOK_S)
                    backoff.reset()
            except HeadwaterError as error:
                self._stage = None
                if not error.retriable:
                    raise
                backoff.wait(stop)

    def _read(self) -> tuple[pa.Table, dict[int, int]]:
        """The next changes in commit order, and where each partition is behind them.

        The partitions are cut at one moment of the log, between two steps of the capture. Where one has more than is read at a time, all
        are cut where that one ends.
        """
        spans = self._log.offsets(self._history)
        each = max(1, EVENTS_MAX // max(1, len(spans)))
        starts = {partition: self.places.get(partition, span.start) for partition, span in spans.items()}
        ends = {partition: min(span.stop, starts[partition] + each) for partition, span in spans.items()}
        if starts == ends:
            return self._log.topic(self._history).schema.empty_table(), starts
        rows = self._log.read(self._history, start=starts, end=ends, columns=self._columns)
        rows = rows.sort_by([(name, "ascending") for name in _ORDER])
        partition, offset = (rows.column(name).to_numpy() for name in _PLACE)
        if not _in_order(partition, offset):  # positions begin anew, as after a backfill of another database
            rows = rows.sort_by([(name, "ascending") for name in ("committed", *_PLACE)])
            partition, offset = (rows.column(name).to_numpy() for name in _PLACE)
        count = rows.num_rows
        for number in (number for number, end in ends.items() if end < spans[number].stop):
            there = np.flatnonzero(partition == number)
            if len(there):
                count = min(count, int(there[-1]) + 1)
        places = dict(ends)
        for number in np.unique(partition[count:]).tolist():
            places[number] = int(offset[count:][partition[count:] == number].min())
        return rows.slice(0, count), places


def _in_order(partition: np.ndarray, offset: np.ndarray) -> bool:
    """Whether the offsets of each partition rise."""
    order = np.argsort(partition, kind="stable")
    rises = np.diff(offset[order]) > 0
    return bool((rises | (np.diff(partition[order]) != 0)).all())
