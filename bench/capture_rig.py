"""A database with one table, captured into a log: what the figures of captures have in common, whichever kind of server it is.

Each run has a server and a log of its own. Rates begin when everything is committed and the capture has not read it yet, so they are those
of catching up; latency is that of single transactions while the capture runs. Everything is measured from a commit to the durable
append, the envelope and the progress included. Debezium reads the same rows of a server with the same settings (see `debezium`).
"""

from __future__ import annotations

import functools
import itertools
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import headwater
from bench import debezium
from bench.harness import Figure, Options, Target, measure, measure_each, scratch
from headwater.sources.capture.capture import Capture
from headwater.sources.capture.open import open_source

ROWS, ROWS_QUICK = 1_000_000, 100_000
SMALL, SMALL_QUICK = 200_000, 20_000
SINGLE, SINGLE_QUICK = 500, 100


class Rig(ABC):
    """A server with the table `t`, and a capture of it into a log where one is wanted."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.capture: Any = None
        self._marks = itertools.count(1)

    @property
    @abstractmethod
    def url(self) -> str:
        """The database."""

    @property
    @abstractmethod
    def table(self) -> str:
        """The table, as SQL has to call it."""

    @abstractmethod
    def connect(self) -> Any:
        """A connection that commits each statement."""

    @abstractmethod
    def insert(self, rows: int, *, each: bool = False) -> None:
        """Rows in transactions of a thousand, or each in one of its own."""

    @abstractmethod
    def read(self) -> int:
        """Reads the whole table as a program does that copies it itself; how many rows there are."""

    @contextmanager
    def marking(self) -> Iterator[Callable[[], Any]]:
        """A function that commits one row, on a connection that is there."""
        with self.connect() as connection, connection.cursor() as cursor:
            yield lambda: cursor.execute(f"insert into {self.table} (id) values (-{next(self._marks)})")

    def bring(self, rows: int) -> tuple[float, float]:
        """Lets the capture bring so many events; rows a second, and rows in a second of our own processor time."""
        cpu_s, began = time.process_time(), time.perf_counter()
        until = self.capture.progress.events + rows
        while self.capture.progress.events < until:
            self.capture.step()
        return rows / (time.perf_counter() - began), rows / (time.process_time() - cpu_s)


@dataclass(frozen=True)
class Kind:
    """A kind of database: what starts a server with an empty table, and what its figures are held against.

    `targets` are bounds on the ratio to Debezium's figure, by the end of a figure's name.
    """

    name: str
    served: Callable[[], AbstractContextManager[Rig]]
    reader: str
    debezium: str
    targets: Mapping[str, Target]

    def benches(self) -> dict[str, Callable[[Options], list[Figure]]]:
        """The groups of figures."""
        groups = {"rates": self.rates, "backfill": self.backfill, "latency": self.latency}
        return {f"{self.name}_{group}": measured for group, measured in groups.items()}

    @contextmanager
    def rigged(self, *, rows_before: int = 0) -> Iterator[Rig]:
        """A server with so many rows, and a capture that has not begun."""
        with scratch() as folder, self.served() as rig, headwater.open_log(str(folder / "log")) as log:
            if rows_before:
                rig.insert(rows_before)
            rig.capture = Capture(log, open_source(rig.url, ["t"], name="shop"))
            rig.capture.open()
            yield rig
            rig.capture.close()

    def rates(self, options: Options) -> list[Figure]:
        """Catching up with bulk inserts and with one-row transactions."""
        rows, small = (ROWS_QUICK, SMALL_QUICK) if options.quick else (ROWS, SMALL)

        def ours(count: int, *, each: bool) -> tuple[float, float]:
            with self.rigged() as rig:
                rig.capture.catch_up()
                rig.insert(count, each=each)
                return rig.bring(count)

        def peer(count: int, *, each: bool) -> tuple[float, float]:
            with scratch() as folder, self.served() as rig, rig.marking() as mark:
                insert = functools.partial(rig.insert, count, each=each)
                return debezium.caught_up(rig.url, "t", folder, rows=count, mark=mark, insert=insert)

        bulk, cpu = measure_each(options, lambda: ours(rows, each=False), lambda: peer(rows, each=False))
        single, _ = measure_each(options, lambda: ours(small, each=True), lambda: peer(small, each=True))
        many, one = "inserts in transactions of 1,000, behind", "one-row transactions, behind"
        return [
            self._figure("bulk", many, "rows/s", bulk),
            self._figure("bulk_cpu", many, "rows/CPU s", cpu),
            self._figure("small", one, "rows/s", single),
        ]

    def backfill(self, options: Options) -> list[Figure]:
        """The first copy of a table, beside a plain read of it."""
        rows = ROWS_QUICK if options.quick else ROWS

        def ours() -> float:
            with self.rigged(rows_before=rows) as rig:
                return rig.bring(rows)[0]

        def peer() -> float:
            with self.served() as rig:
                rig.insert(rows)
                began = time.perf_counter()
                return rig.read() / (time.perf_counter() - began)

        pair, name = measure(options, ours, peer), f"{self.name}_backfill"
        return [Figure(name, "a table copied into the log", "rows/s", pair, self.reader, Target(">=", 0.5))]

    def latency(self, options: Options) -> list[Figure]:
        """From the return of a COMMIT to the event at a reader of the log, or in Debezium's handler."""
        count = SINGLE_QUICK if options.quick else SINGLE

        def ours() -> float:
            with self.rigged() as rig, rig.marking() as mark:
                rig.capture.catch_up()
                stop, waits = threading.Event(), []
                thread = threading.Thread(target=rig.capture.run, args=(stop,))
                thread.start()
                try:
                    with rig.capture._log.reader("t") as reader:
                        for _ in range(count):
                            mark()
                            began = time.perf_counter()
                            while not reader.poll(events_max=1, timeout_s=1.0):
                                pass
                            waits.append(time.perf_counter() - began)
                finally:
                    stop.set()
                    thread.join()
                return statistics.median(waits) * 1000

        def peer() -> float:
            with scratch() as folder, self.served() as rig, rig.marking() as mark:
                return debezium.latency_ms(rig.url, "t", folder, count=count, mark=mark)

        pair = measure(options, ours, peer, better="lower")
        return [self._figure("latency_p50", "a COMMIT to its event at a reader", "ms", pair)]

    def _figure(self, name: str, what: str, unit: str, pair: Any) -> Figure:
        return Figure(f"{self.name}_{name}", what, unit, pair, self.debezium, self.targets.get(name))
