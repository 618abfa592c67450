"""An SQL query over topics, executed by DuckDB over Arrow.

Each topic that the query names is a view: its columns, then `_partition, _offset, _time, _appended, _key, _deleted`. DuckDB
streams all of them up to one snapshot of the log's ends. It cannot access files or write anything. A query has limits of
time and memory; DuckDB spills to a temporary folder, which has a limit too.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa

from headwater.log.log import Log
from headwater.model.errors import HeadwaterError, InvalidInput, TimedOut, TopicNotFound
from headwater.model.text import check_text

META = ("_partition", "_offset", "_time", "_appended", "_key", "_deleted")
TIMEOUT_S = 60.0
MEMORY_MB = 1_000
SPILL = "10GB"

_BATCH_ROWS = 65_536
_INTERRUPT_S = 0.1


@contextmanager
def answer(
    log: Log,
    query: str,
    *,
    tables: Mapping[str, pa.Table] | None = None,
    timeout_s: float = TIMEOUT_S,
    memory_mb: int = MEMORY_MB,
) -> Iterator[pa.RecordBatchReader]:
    """Runs a query over topics and over other tables; yields its result as a stream of batches.

    `timeout_s` limits DuckDB's computing time, without the time of the reader of the batches; `TimedOut`.
    """
    scans = _scans(log, check_text(query, "The query"))
    with tempfile.TemporaryDirectory(prefix="headwater-sql-") as folder:
        connection = connect(folder, memory_mb=memory_mb)
        clock = _Patience(connection, timeout_s)
        try:
            _check_reads(connection, query)
            for name, rows in {**scans, **(tables or {})}.items():
                connection.register(name, rows)
            reader = clock.wait(lambda: connection.sql(query).to_arrow_reader(_BATCH_ROWS))
            yield pa.RecordBatchReader.from_batches(reader.schema, _batches(clock, reader))
        except duckdb.OutOfMemoryException as error:
            raise InvalidInput(
                f"The query needs more than {memory_mb:,} MB of memory: {first_sentence(error)}",
                advice="Raise the limit with --memory MB, or select less: fewer columns, a condition, a limit.",
            ) from None
        except (duckdb.Error, pa.ArrowException) as error:
            raise _told(error, scans.values(), log) from None
        finally:
            connection.close()


def connect(folder: str, *, memory_mb: int = MEMORY_MB) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection that accesses only registered tables, and spills to `folder`."""
    connection = duckdb.connect(":memory:", config={"python_enable_replacements": "false"})
    connection.execute("set temp_directory = $folder", {"folder": folder})
    connection.execute(f"set memory_limit = '{memory_mb}MB'")
    connection.execute(f"set max_temp_directory_size = '{SPILL}'")
    connection.execute("set TimeZone = 'UTC'")
    connection.execute("set enable_external_access = false")
    return connection


def _batches(clock: _Patience, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    while (batch := clock.wait(lambda: next(reader, None))) is not None:
        yield batch


class _Patience:
    """Waits for DuckDB, up to a total time. DuckDB runs in another thread, because it does not react to Ctrl-C."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._left_s = timeout_s

    def wait(self, work: Callable[[], Any]) -> Any:
        """The result of the work, or `TimedOut`."""
        begun = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work)
            try:
                return future.result(timeout=min(max(self._left_s, 0.0), threading.TIMEOUT_MAX))
            except TimeoutError:
                self._end(future)
                raise TimedOut(
                    f"The query did not finish within {self._timeout_s:g} s.",
                    advice="Raise the limit with --timeout SECONDS, or select less: a condition, a limit.",
                ) from None
            except KeyboardInterrupt:
                self._end(future)
                raise
            finally:
                self._left_s -= time.monotonic() - begun

    def _end(self, future: Future[Any]) -> None:
        """Interrupts until the work has ended, because DuckDB ignores an interrupt between two steps."""
        while not future.done():
            self._connection.interrupt()
            wait([future], timeout=_INTERRUPT_S)


class _Scan:
    """A topic up to an end, which can be read again and again; keeps the error that ended a reading."""

    def __init__(self, log: Log, topic: str, ends: Mapping[int, int]) -> None:
        self.failure: HeadwaterError | None = None
        self._log = log
        self._topic = topic
        self._ends = ends
        self._columns = [*log.topic(topic).schema.names, *META]

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        batches = self._log.scan(self._topic, end=self._ends, columns=self._columns)
        return pa.RecordBatchReader.from_batches(batches.schema, self._kept(batches)).__arrow_c_stream__(
            requested_schema
        )

    def _kept(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except HeadwaterError as error:
            self.failure = error
            raise


def _scans(log: Log, query: str) -> dict[str, _Scan]:
    """The topics whose names occur in the query. An extra one costs little, while a parser would refuse some of DuckDB's SQL."""
    asked = query.lower()
    names = [name for name in log.topics() if re.search(rf"(?<!\w){re.escape(name.lower())}(?!\w)", asked)]
    ends: dict[str, dict[int, int]] = {name: {} for name in names}
    for (name, number), bound in log.store.bounds(names).items():
        ends[name][number] = bound.end
    return {name: _Scan(log, name, ends[name]) for name in names}


def _check_reads(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    kinds = [statement.type for statement in connection.extract_statements(query)]
    if len(kinds) != 1:
        raise InvalidInput(f"The query has {len(kinds)} statements.", advice="Run one statement at a time.")
    # DuckDB splits a PIVOT whose columns it must look up first into several statements, and calls that MULTI.
    if kinds[0] not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.MULTI):
        raise InvalidInput(
            f"`sql` is read-only and does not run {kinds[0].name}.", advice="Use `headwater produce` to append events."
        )


def _told(error: Exception, scans: Iterable[_Scan], log: Log) -> HeadwaterError:
    """DuckDB's error as one of ours, or the error of the topic that could not be read."""
    for scan in scans:
        if scan.failure is not None:
            return scan.failure
    known = ", ".join(f'"{name}"' if re.search(r"\W", name) else name for name in log.topics()[:10]) or "none"
    advice = f"The topics of this log are: {known}. Put names with '.' or '-' in double quotes."
    if isinstance(error, duckdb.CatalogException):
        return TopicNotFound(str(error).strip().partition("\n")[0], advice=advice)
    return InvalidInput(first_sentence(error), advice=f"Write a query in DuckDB's SQL, with topics as tables. {advice}")


def first_sentence(error: Exception) -> str:
    """DuckDB's message without its excerpt of the query."""
    return str(error).strip().partition("\n\n")[0].replace("\n", " ")
