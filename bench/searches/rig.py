"""The rig of the searches' figures: one stage of ours for each number of searches, and Lucene Monitor.

A stage takes the searches in before its first timed run, as Lucene registers them before. All sides must find the same number of pairs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import cached_property

from pyspark.sql import DataFrame

import headwater as hw
from bench.searches.lucene_side import BATCH, PEER, LuceneSide, Matched
from bench.searches.search_log import DOCUMENTS_TOPIC, SEARCHES_TABLE, TEXT, TIME, SearchLog
from bench.stage import StageRig, StageRun
from headwater.testing.servers import ServerError

CHANGED_AT_ONCE = 1_000


def percolated(documents: DataFrame, searches: object) -> DataFrame:
    """Our side: each document with each search that matches it."""
    return hw.percolate(documents, searches, text=[TEXT], at=TIME).select("document", "search")


class WrongCount(RuntimeError):
    """A side found another number of pairs than the others."""


class SearchRig(StageRig):
    """What searches are measured with."""

    def __init__(self) -> None:
        super().__init__()
        self._stages: dict[int, tuple[SearchLog, Callable[[], StageRun]]] = {}
        self._pairs: dict[tuple[int, int], int] = {}

    def ours(self, searches: int, count: int, *, copies: int = 1) -> StageRun:
        """The first `count` documents, so many times, matched by ours with so many searches."""
        log, run = self._stage(searches, count)
        log.add_documents(count, copies=copies)
        found = run()
        if found.rows % copies:
            raise WrongCount(f"ours found {found.rows:,} pairs in {copies} times the same documents")
        self._check("ours", searches, count, found.rows // copies)
        return found

    def by_lucene(self, searches: int, count: int, *, batch: int = 1) -> Matched:
        """The same by Lucene, so many documents at a time."""
        assert self.lucene is not None
        found = self.lucene.match(count, searches=searches, batch=batch)
        self._check(f"{PEER}, {batch} at a time", searches, count, found.matches)
        return found

    def check(self, searches: int, count: int) -> None:
        """Ask Lucene how many pairs there are, in batches, so that each side that is run is held against it."""
        if (searches, count) not in self._pairs:
            self.by_lucene(searches, count, batch=BATCH)

    def slowest_batch(self, searches: int, count: int, *, rounds: int) -> float:
        """The slowest batch beside the median, while 1,000 searches change between a batch of documents and the next.

        One change of each round is a search for the word that all documents of the round have: it holds in the batch.
        """
        log, run = self._stage(searches, count)
        pairs = self.ours(searches, count).rows
        seconds = []
        for number in range(rounds):
            word = f"probe{number}"
            log.change(
                [("probe", word), *((f"changed-{each}", f"unwritten{number}") for each in range(1, CHANGED_AT_ONCE))]
            )
            log.add_documents(count, word=word)
            found = run()
            if found.rows != pairs + count:
                raise WrongCount(f"ours found {found.rows:,} pairs after a change, and there are {pairs + count:,}")
            seconds.append(max(found.batches_s))
        return max(seconds) / statistics.median(seconds)

    @cached_property
    def lucene(self) -> LuceneSide | None:
        """Lucene; prints the reason when it cannot be had."""
        try:
            return self._stack.enter_context(LuceneSide(self.folder))
        except ServerError as error:
            print(f"{PEER} is left out: {error}", file=sys.stderr)
            return None

    def _stage(self, searches: int, count: int) -> tuple[SearchLog, Callable[[], StageRun]]:
        """A stage that has taken so many searches in, and is warm."""
        if searches not in self._stages:
            log = SearchLog(self.folder / f"searches-{searches}", searches)
            stage = self.stage(log.url, percolated, topics=[DOCUMENTS_TOPIC], tables=[SEARCHES_TABLE])
            self._stages[searches] = log, self._stack.enter_context(stage)
            for _ in range(2):
                self.ours(searches, count)
        return self._stages[searches]

    def _check(self, side: str, searches: int, count: int, pairs: int) -> None:
        expected = self._pairs.setdefault((searches, count), pairs)
        if pairs != expected:
            raise WrongCount(f"{side} found {pairs:,} pairs, and others found {expected:,}")
