"""A log with saved searches in a table and documents in a topic, which get more of both by and by.

Times only rise: what is appended later is later. After each append both topics have closing rows, one hour later, so that no document
still waits for the watermark. A closing document has a word that no search has, and a closing search has a word that no document has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import headwater as hw
from bench.searches.workload import documents, searches

DOCUMENTS_TOPIC, SEARCHES_TABLE = "documents", "searches"
TIME, TEXT = "at", "body"
_DOCUMENTS = (
    "document BIGINT NOT NULL, price BIGINT NOT NULL, rooms BIGINT NOT NULL, area BIGINT NOT NULL,"
    f" category STRING NOT NULL, {TEXT} STRING NOT NULL, {TIME} TIMESTAMP NOT NULL"
)
_SEARCHES = "search STRING NOT NULL, query STRING NOT NULL, changed_at TIMESTAMP NOT NULL"
_PARTITIONS = 4
_CLOSERS = 64
_BEGINNING_US = 1_735_689_600_000_000  # 2025-01-01: in the past, so that no log takes the times for a wrong clock
_HOUR_US = 3_600_000_000
_SEARCHES_PER_APPEND = 100_000


class SearchLog:
    """A log in a folder with so many searches, and no document yet."""

    def __init__(self, folder: Path, count: int) -> None:
        self.url = str(folder)
        self._documents = 0
        self._now_us = _BEGINNING_US
        with hw.open_log(self.url) as log:
            settings = {"time": TIME, "lateness": "0 seconds", "partitions": _PARTITIONS}
            log.create_topic(DOCUMENTS_TOPIC, _DOCUMENTS, key="document", **settings)
            settings["time"] = "changed_at"
            log.create_topic(SEARCHES_TABLE, _SEARCHES, key="search", compact=True, **settings)
        numbered = ((f"search-{number}", search.text()) for number, search in enumerate(searches(count)))
        for part in iter(lambda: list(itertools.islice(numbered, _SEARCHES_PER_APPEND)), []):
            self.change(part)

    def change(self, changed: Iterable[tuple[str, str]]) -> None:
        """Append searches: new ones, or new texts of those that are there."""
        names, texts = zip(*changed, strict=True)
        self._now_us += 1
        self._append(SEARCHES_TABLE, {"search": names, "query": texts, "changed_at": self._times(len(names), 0)})

    def add_documents(self, count: int, *, copies: int = 1, word: str | None = None) -> None:
        """Append the first documents of the workload, so many times; with `word` each has this word at its end."""
        for _ in range(copies):
            table = documents().slice(0, count)
            text = table.column(TEXT)
            self._append_documents(table, pc.binary_join_element_wise(text, word, " ") if word else text)
        self._now_us += _HOUR_US
        self._append_documents(documents().slice(0, _CLOSERS), pa.array(["closing"] * _CLOSERS))
        self.change((f"close-{number}", "neverwritten") for number in range(_CLOSERS))

    def _append_documents(self, table: pa.Table, text: pa.Array | pa.ChunkedArray) -> None:
        numbers = np.arange(self._documents, self._documents + len(table))
        self._documents += len(table)
        columns = {name: table.column(name) for name in ("price", "rooms", "area", "category")}
        times = self._times(len(table), 1)
        self._append(DOCUMENTS_TOPIC, {"document": numbers, **columns, TEXT: text, TIME: times})

    def _times(self, count: int, step_us: int) -> pa.Array:
        """The times of so many rows, with so much between them; what comes next is later."""
        times = self._now_us + step_us * np.arange(1, count + 1)
        self._now_us += step_us * count
        return pa.array(times).cast(pa.timestamp("us", "UTC"))

    def _append(self, topic: str, columns: dict[str, Sequence[object]]) -> None:
        with hw.open_log(self.url) as log:
            log.append(topic, pa.table(columns))
