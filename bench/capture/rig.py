"""A database with one table, captured into a log: what the figures of captures have in common, whichever kind of server it is.

Each run has a server and a log of its own. Rates begin when everything is committed and the capture has not read it yet, so they are those
of catching up; latency is that of single transactions while the capture runs. Everything is measured from a commit to the durable
append, the envelope and the progress included. Debezium reads the same rows of a server with the same settings (see `debezium`).
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import random
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import headwater
from bench.capture import debezium
from bench.harness import Figure, Options, Target, measure, measure_each, scratch
from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source
from headwater.log.clients.reader import Reader
from headwater.model.points import watched
from headwater.testing.servers.guard import die_with_parent

ROWS, ROWS_QUICK = 1_000_000, 100_000
SMALL, SMALL_QUICK = 200_000, 20_000
SINGLE, SINGLE_QUICK = 500, 100
PAUSE_S_MAX, PAUSES_SEED = 0.05, 17


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
        """The median from the return of a COMMIT to the event at a reader of the log, or in Debezium's handler.

        Debezium is measured as it comes and told to look every millisecond. Its events are handed over in its own process, and are on
        no disk: where ours are as far, envelope and progress made and nothing written, is a figure of its own. Both sides have a process
        of their own, or the capture's work would hold up the return of the COMMIT. See `_median_ms` for when transactions commit.
        """
        count = SINGLE_QUICK if options.quick else SINGLE

        def at_a_reader() -> float:
            with (
                scratch() as folder,
                self.served() as rig,
                _capturing(rig.url, str(folder)),
                headwater.open_log(folder) as log,
                log.reader("t") as reader,
                rig.marking() as mark,
            ):
                return _median_ms(mark, count, lambda: _arrivals(reader, count))

        def handed_over() -> float:
            with (
                scratch() as folder,
                self.served() as rig,
                _capturing(rig.url, str(folder)) as made,
                rig.marking() as mark,
            ):
                return _median_ms(mark, count, lambda: _made(made, count))

        def peer(poll_ms: int) -> float:
            with (
                scratch() as folder,
                self.served() as rig,
                debezium.Debezium(rig.url, "t", folder, poll_ms=poll_ms) as engine,
                rig.marking() as mark,
            ):
                before = engine.follow(mark)
                return _median_ms(mark, count, lambda: engine.arrivals(before=before, count=count))

        read, made, figures = "a COMMIT to its event at a reader", "a COMMIT to its event in the capture's process", []
        for name, what, ours, poll_ms in (
            ("latency_p50", read, at_a_reader, debezium.POLL_MS),
            ("latency_tuned_p50", read, at_a_reader, debezium.POLL_MS_TUNED),
            ("latency_handed_p50", made, handed_over, debezium.POLL_MS_TUNED),
        ):
            pair = measure(options, ours, functools.partial(peer, poll_ms), better="lower")
            figures.append(self._figure(name, f"{what}; Debezium looks every {poll_ms} ms", "ms", pair))
        return figures

    def _figure(self, name: str, what: str, unit: str, pair: Any) -> Figure:
        return Figure(f"{self.name}_{name}", what, unit, pair, self.debezium, self.targets.get(name))


def _median_ms(mark: Callable[[], object], count: int, arrivals: Callable[[], list[float]]) -> float:
    """Commits so many rows, each by itself, and holds the moments at which they committed against those at which they arrived.

    Pauses are irregular, the same for all sides, and no commit waits for the event before it. One that did would be unfair to a side that
    hands over at intervals: it would come when an interval has just begun, and wait for all of it. At any moment, when applications do
    commit, it waits for a part of it. The n-th event to arrive counts as that of the n-th commit.
    """
    pauses, committed = random.Random(PAUSES_SEED), []
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(arrivals)
        for _ in range(count):
            time.sleep(pauses.uniform(0.0, PAUSE_S_MAX))
            mark()
            committed.append(time.monotonic())
        came = coming.result()
    return statistics.median(at - began for at, began in zip(came, committed, strict=True)) * 1000


def _arrivals(reader: Reader, count: int) -> list[float]:
    """When each of the next events came."""
    came: list[float] = []
    while len(came) < count:
        events = reader.poll(timeout_s=debezium.TIMEOUT_S)
        if not events:
            raise RuntimeError(f"The capture brought nothing for {debezium.TIMEOUT_S:g} s.")
        came += [time.monotonic()] * len(events)
    return came


def _made(made: Connection, count: int) -> list[float]:
    """When each of the next events was made, before anything of it was written."""
    came: list[float] = []
    before = 0
    while len(came) < count:
        if not made.poll(debezium.TIMEOUT_S):
            raise RuntimeError(f"The capture brought nothing for {debezium.TIMEOUT_S:g} s.")
        events, at_s = made.recv()
        came += [at_s] * (events - before)
        before = events
    return came


@contextmanager
def _capturing(url: str, folder: str) -> Iterator[Connection]:
    """A process that captures the table, from when it has caught up; it tells how many events it has made, and when."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    made, tell = context.Pipe(duplex=False)
    process = context.Process(target=_capture, args=(url, folder, ready, tell), daemon=True)
    process.start()
    try:
        if not ready.wait(debezium.TIMEOUT_S):
            raise RuntimeError("The capture does not catch up.")
        yield made
    finally:
        process.terminate()
        process.join()


def _capture(url: str, folder: str, ready: Event, tell: Connection) -> None:
    die_with_parent()

    def note(point: str) -> None:
        at_s = time.monotonic()
        if point == "capture: before append" and capture.progress.events:
            tell.send((capture.progress.events, at_s))

    with headwater.open_log(folder) as log, watched(note):
        capture = Capture(log, open_source(url, ["t"], name="shop"))
        capture.open()
        capture.catch_up()
        ready.set()
        capture.run(threading.Event())
