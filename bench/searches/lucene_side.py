"""Lucene Monitor beside ours: one process with the searches in memory, matched from one thread.

It is set up as a careful user would: the presearcher with several passes, terms weighed by their frequency in a sample of the documents,
and prefixes as regular expressions, since the presearcher has n-grams for these only.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bench.java import JavaPeer, JavaProcess
from bench.searches.workload import documents, searches

VERSION = "9.11.1"
PEER = f"Lucene Monitor {VERSION.rpartition('.')[0]}"
BATCH = 2_000

_LUCENE = JavaPeer(
    name=f"lucene-monitor-{VERSION}",
    source=Path(__file__).with_name("LuceneSide.java"),
    artifacts=(f"org.apache.lucene:lucene-monitor:{VERSION}",),
)


class Matched(NamedTuple):
    """What matching some documents needed, and how many pairs of document and search it found."""

    cpu_s: float
    seconds: float
    matches: int


class LuceneSide(JavaProcess):
    """A process that matches documents; a context manager. Raises `ServerError` when Lucene cannot be had."""

    def __init__(self, folder: Path) -> None:
        super().__init__(_LUCENE, folder)
        self._folder = folder
        self._searches = 0

    def match(self, count: int, *, searches: int, batch: int = 1) -> Matched:
        """Match the first `count` documents, `batch` at a time, with so many searches."""
        if self._searches != searches:
            self._register(searches)
        cpu_ns, ns, matches = map(int, self.ask("run", 0, count, batch))
        return Matched(cpu_ns / 1e9, ns / 1e9, matches)

    def _register(self, count: int) -> None:
        table = documents()
        columns = (table.column(name).to_pylist() for name in ("price", "rooms", "area", "category", "body"))
        with open(self._folder / "documents.tsv", "w") as file:
            file.writelines("\t".join(map(str, row)) + "\n" for row in zip(*columns, strict=True))
        with open(self._folder / "searches.tsv", "w") as file:
            file.writelines(f"{search.line()}\n" for search in searches(count))
        self.ask("documents", self._folder / "documents.tsv")
        self.ask("searches", self._folder / "searches.tsv", count)
        self._searches = count
