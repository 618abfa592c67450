"""The rig of the patterns' figures: bids of any number, and each pattern by ours, by Flink and by Esper.

Each run is checked: a side that does not find as many matches as the loops of `oracle` has no rate. Flink's timed job writes its matches
to a sink that drops them, so its count comes from a job before the first timed one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame

import headwater as hw
from bench.patterns import oracle
from bench.patterns.bids import CLOSERS, TOPIC, Bids
from bench.patterns.esper_side import PEER as ESPER
from bench.patterns.esper_side import EsperSide
from bench.patterns.flink_side import PEER as FLINK
from bench.patterns.flink_side import FlinkSide
from bench.patterns.queries import AVERAGE, RISING, Query, Rule
from bench.stage import StageRig
from examples.nexmark.topics import TIME
from headwater.testing.servers import ServerError

RULES_TOPIC = "rules"
Peer = TypeVar("Peer", FlinkSide, EsperSide)
_RULES_SCHEMA = "rule STRING NOT NULL, pattern STRING NOT NULL, changed_at TIMESTAMP NOT NULL"
_BEFORE_ALL_BIDS = datetime(2024, 1, 1, tzinfo=UTC)
_LOOPS = {RISING: oracle.rising, AVERAGE: oracle.average}


def detected(bids: DataFrame, text: str) -> DataFrame:
    """Our side of a pattern."""
    return hw.detect(bids, text)


def detected_by_rules(bids: DataFrame, rules: object, key: str) -> DataFrame:
    """Our side of rules, which are rows of a table."""
    return hw.detect(bids, key=key, rules=rules)


class WrongCount(RuntimeError):
    """A side found another number of matches than the loops."""


class PatternRig(StageRig):
    """What patterns are measured with."""

    def __init__(self) -> None:
        super().__init__()
        self._bids: dict[int, Bids] = {}
        self._matches: dict[tuple[Query, str, Bids], int] = {}

    def bids(self, count: int) -> Bids:
        """So many bids; the rig keeps them for the next figure."""
        if count not in self._bids:
            self._bids[count] = Bids(self.folder / f"bids-{count}", count)
        return self._bids[count]

    def ours(self, query: Query, key: str, bids: Bids) -> float:
        """Bids a second that ours finds a pattern in."""

        def detect(bids: DataFrame) -> DataFrame:
            return detected(bids, query.text(key))

        with self.stage(bids.url, detect, topics=[TOPIC]) as run:
            found = run()
        _check("ours", found.rows, self._expected(query, key, bids))
        return len(bids) / found.seconds

    def by_flink(self, query: Query, key: str, bids: Bids) -> float:
        """The same of Flink. `check_flink` looks at what it finds."""
        assert self.flink is not None
        return len(bids) / self.flink.run(query.sql(key), bids)

    def check_flink(self, query: Query, key: str, bids: Bids) -> None:
        """Raises `WrongCount` when Flink does not find the right number of matches."""
        assert self.flink is not None
        _check(FLINK, self.flink.matches(query.sql(key), bids), self._expected(query, key, bids))

    def by_esper(self, query: Query, key: str, bids: Bids) -> float:
        """The same of Esper."""
        assert self.esper is not None
        seconds, matches = self.esper.run([query.statement(key)], bids)
        _check(ESPER, matches, self._expected(query, key, bids))
        return len(bids) / seconds

    def ours_by_rules(self, rules: Sequence[Rule], key: str, bids: Bids) -> float:
        """Bids a second that ours holds against all rules."""

        def detect(bids: DataFrame, rules: object) -> DataFrame:
            return detected_by_rules(bids, rules, key)

        _append_rules(bids, rules)
        with self.stage(bids.url, detect, topics=[TOPIC], tables=[RULES_TOPIC]) as run:
            found = run()
        _check("ours", found.rows, oracle.rules(bids.table, key, rules))
        return len(bids) / found.seconds

    def by_esper_rules(self, rules: Sequence[Rule], key: str, bids: Bids) -> float:
        """The same of Esper, with a statement for each rule."""
        assert self.esper is not None
        seconds, matches = self.esper.run([rule.query.statement(key) for rule in rules], bids)
        _check(ESPER, matches, oracle.rules(bids.table, key, rules))
        return len(bids) / seconds

    @cached_property
    def flink(self) -> FlinkSide | None:
        """Flink; prints the reason when it cannot be had."""
        return self._side(FLINK, lambda: FlinkSide(self.folder))

    @cached_property
    def esper(self) -> EsperSide | None:
        """Esper; prints the reason when it cannot be had."""
        return self._side(ESPER, lambda: EsperSide(self.folder))

    def _side(self, peer: str, start: Callable[[], Peer]) -> Peer | None:
        try:
            return self._stack.enter_context(start())
        except ServerError as error:
            print(f"{peer} is left out: {error}", file=sys.stderr)
            return None

    def _expected(self, query: Query, key: str, bids: Bids) -> int:
        asked = query, key, bids
        if asked not in self._matches:
            loop = _LOOPS.get(query)
            table = bids.table
            self._matches[asked] = oracle.counted(table, key, loop) if loop else oracle.small_large(table, key)
        return self._matches[asked]


def _append_rules(bids: Bids, rules: Sequence[Rule]) -> None:
    """The rules as rows of a table in the log of the bids, all of them before the first bid.

    Closing rules follow after the last bid, so that no bid still waits for the watermark of the table.
    """
    with hw.open_log(bids.url) as log:
        if RULES_TOPIC not in log.topics():
            log.create_topic(RULES_TOPIC, _RULES_SCHEMA, key="rule", time="changed_at", compact=True, partitions=4)
            texts = [rule.query.rule() for rule in rules]
            last = max(bids.table.column(TIME).to_pylist()[-CLOSERS:])
            log.append(RULES_TOPIC, _rules([f"rule-{number}" for number in range(len(rules))], texts, _BEFORE_ALL_BIDS))
            closers = [f"close-{number}" for number in range(CLOSERS)]
            log.append(RULES_TOPIC, _rules(closers, texts[:1] * CLOSERS, last + timedelta(hours=1)))


def _rules(names: Sequence[str], texts: Sequence[str], changed_at: datetime) -> pa.Table:
    times = pa.array([changed_at] * len(names), pa.timestamp("us", "UTC"))
    return pa.table({"rule": names, "pattern": texts, "changed_at": times})


def _check(side: str, found: int, expected: int) -> None:
    if found != expected:
        raise WrongCount(f"{side} found {found:,} matches, and there are {expected:,}")
