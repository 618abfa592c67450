"""SQLite captured into a log: what it costs the application that writes, and how quickly the log has it.

The application's figures are those of inserts while the capture runs in another process, beside the same inserts into a database that
nobody captures: each in a transaction of its own with SQLite's default durability, and in transactions of a thousand, which are mostly the
triggers' own work. Rates of the capture begin when everything is committed, so they are those of catching up.
"""

from __future__ import annotations

import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import headwater
from bench.harness import Figure, Options, Target, measure, measure_each, scratch
from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source
from headwater.log.log import Log

ROWS, ROWS_QUICK = 500_000, 50_000
SINGLE, SINGLE_QUICK = 20_000, 500
WAITS, WAITS_QUICK = 500, 100
TABLE = "CREATE TABLE t (id INTEGER PRIMARY KEY, k INT, name TEXT, amount REAL, ts TEXT, note TEXT)"
INSERT = "INSERT INTO t VALUES (?, ?, ?, ?, ?, ?)"


def inserts(options: Options) -> list[Figure]:
    """The application's inserts with a capture, and without."""
    rows, single = (ROWS_QUICK, SINGLE_QUICK) if options.quick else (ROWS, SINGLE)

    def written(*, captured: bool) -> tuple[float, float]:
        with scratch() as folder, database(folder) as connection, capturing(folder, is_on=captured):
            return write(connection, single, each=1), write(connection, rows, each=1000)

    one, many = measure_each(options, lambda: written(captured=True), lambda: written(captured=False))
    peer = "SQLite, not captured"
    return [
        Figure("sqlite_inserts", "application, one-row transactions", "rows/s", one, peer, Target(">=", 0.65)),
        Figure("sqlite_inserts_bulk", "application, transactions of 1,000", "rows/s", many, peer),
    ]


def rates(options: Options) -> list[Figure]:
    """The first copy, and catching up with changes."""
    rows = ROWS_QUICK if options.quick else ROWS

    def copied() -> float:
        with scratch() as folder, database(folder) as connection:
            write(connection, rows, each=rows)
            with captured_into(folder) as (_, capture):
                return timed(capture, rows)

    def followed() -> float:
        with scratch() as folder, database(folder) as connection, captured_into(folder) as (_, capture):
            capture.catch_up()
            write(connection, rows, each=1000)
            return timed(capture, rows)

    return [
        Figure("sqlite_backfill", "a table copied into the log", "rows/s", measure(options, copied)),
        Figure("sqlite_changes", "inserts, behind", "rows/s", measure(options, followed)),
    ]


def latency(options: Options) -> list[Figure]:
    """From the return of a COMMIT to the event at a reader."""
    count = WAITS_QUICK if options.quick else WAITS

    def once() -> float:
        with scratch() as folder, database(folder) as connection, captured_into(folder) as (log, capture):
            capture.catch_up()
            stop, waits = threading.Event(), []
            thread = threading.Thread(target=capture.run, args=(stop,))
            thread.start()
            with log.reader("t") as reader:
                for number in range(count):
                    connection.execute("INSERT INTO t (id) VALUES (?)", (number,))
                    began = time.perf_counter()
                    while not reader.poll(events_max=1, timeout_s=1.0):
                        pass
                    waits.append(time.perf_counter() - began)
            stop.set()
            thread.join()
            return statistics.median(waits) * 1000

    pair = measure(options, once, better="lower")
    return [Figure("sqlite_latency_p50", "a COMMIT to its event at a reader", "ms", pair)]


@contextmanager
def database(folder: Path, *, create: bool = True) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(folder / "shop.db", isolation_level=None, timeout=60)) as connection:
        if create:
            connection.execute("PRAGMA journal_mode = wal")
            connection.execute(TABLE)
        yield connection


@contextmanager
def captured_into(folder: Path) -> Iterator[tuple[Log, Capture]]:
    with headwater.open_log(str(folder / "log")) as log:
        capture = Capture(log, open_source(f"sqlite:///{folder}/shop.db"))
        capture.open()
        yield log, capture
        capture.close()


@contextmanager
def capturing(folder: Path, *, is_on: bool) -> Iterator[None]:
    """A capture in a process of its own, which follows when the block begins: it has brought a row by then."""
    if not is_on:
        yield
        return
    command = [sys.executable, "-m", "headwater.cli.main", "--log", str(folder / "log"), "capture", "run"]
    with captured_into(folder) as (log, capture), database(folder, create=False) as connection:
        capture.catch_up()
        capture.close()
        process = subprocess.Popen([*command, f"sqlite:///{folder}/shop.db"], stdout=subprocess.DEVNULL)
        try:
            connection.execute("INSERT INTO t (id) VALUES (0)")
            with log.reader("t") as reader:
                while not reader.poll(events_max=1, timeout_s=1.0):
                    assert process.poll() is None, "the capture has ended"
            yield
        finally:
            process.terminate()
            process.wait()


def write(connection: sqlite3.Connection, count: int, *, each: int) -> float:
    """Rows a second of so many inserts, so many in a transaction."""
    (first,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM t").fetchone()
    rows = [(n, n % 100, f"name {n}", n * 1.5, "2026-01-01T00:00:00Z", "x" * 40) for n in range(first, first + count)]
    began = time.perf_counter()
    for start in range(0, count, each):
        connection.execute("BEGIN")
        connection.executemany(INSERT, rows[start : start + each])
        connection.execute("COMMIT")
    return count / (time.perf_counter() - began)


def timed(capture: Capture, rows: int) -> float:
    """Rows a second until the capture has brought everything."""
    began, before = time.perf_counter(), capture.progress.events
    capture.catch_up()
    assert capture.progress.events - before == rows
    return rows / (time.perf_counter() - began)


SQLITE_BENCHES = {"sqlite_inserts": inserts, "sqlite_rates": rates, "sqlite_latency": latency}
