"""State in an application: another number of partitions, another place, lost and rebuilt from the log, keys of every type."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.model.errors import InvalidApp, InvalidInput
from tests.rigs.app.storm_orders import asleep, environment, kill_session, order

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATENESS = timedelta(seconds=20)
ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def pace_over(seconds: int) -> Any:
    """The function of the stage `pace`."""

    def pace(bids: DataFrame) -> DataFrame:
        once = hw.dedupe(bids, "id")
        return hw.sliding(once, by=["who", "lot"], over=f"{seconds} seconds", at="at", n="count", most=("max", "price"))

    return pace


class Auction:
    """An application whose one stage has two operators, and bids that come in any order within the lateness, some of them twice."""

    def __init__(self, folder: Path, spark: SparkSession | None, seed: int) -> None:
        self.folder, self.spark, self.random, self.number = folder, spark, Random(seed), 0
        self.url = str(folder / "log")
        print("seed", seed)

    def app(self, over_s: int = 30, **settings: Any) -> hw.App:
        app = hw.App("auction", log=self.url, spark=self.spark, **settings)
        schema = "id BIGINT, who STRING, lot INT, price BIGINT, at TIMESTAMP"
        bids = app.topic("bids", schema=schema, key="who", time="at", lateness="20 seconds", partitions=2)
        app.stream(bids, to="pace", key="who")(pace_over(over_s))
        return app

    def feed(self, count: int = 60) -> None:
        rows = [self._bid() for _ in range(count)]
        rows += [dict(row) for row in self.random.sample(rows, 6)]
        rows.sort(key=lambda row: row["at"] + timedelta(seconds=self.random.uniform(0, 19)))
        with hw.open_log(self.url) as log:
            if "bids" not in log.topics():
                log.create_topic(
                    "bids", "id BIGINT, who STRING, lot INT, price BIGINT, at TIMESTAMP", key="who", time="at",
                    lateness="20 seconds", partitions=2,
                )  # fmt: skip
            log.append("bids", rows)

    def trim(self) -> None:
        """Lets retention remove what is there."""
        with hw.open_log(self.url) as log:
            log.alter_topic("bids", retention="1 millisecond")
            time.sleep(0.01)
            log.tidy("bids")
            log.alter_topic("bids", retention=None)

    def run(self, *, rebuild: dict[str, Any] | None = None, **settings: Any) -> str | None:
        """What the stage failed with, if it did."""
        status = self.app(**settings).run(available_now=True, rebuild_state=rebuild, check=False)
        return status.stages[0].error if status.stages[0].state == "failed" else None

    def kill_task(self) -> None:
        """Kills a task in the middle of a batch, when it has saved its state and Spark has not committed the batch; then the rest of the
        application, and the disk of one operator's state is lost."""
        process = self._elsewhere("run_on", environment(self.folder))
        try:
            self._wait_for((self.checkpoint / "commits" / "0").exists, process)
            assert any(self.operators.glob("sliding-1/*/*.state"))
            order(self.folder, "state: saved", "stop")
            self.feed()
            self._wait_for(lambda: bool(asleep(self.folder)), process)
            [task] = asleep(self.folder)
            batch = max(int(path.name) for path in (self.checkpoint / "offsets").glob("[0-9]*"))
            commit = self.checkpoint / "commits" / str(batch)
            assert batch > 0 and not commit.exists(), "a batch is under way"
            order(self.folder, "state: saved", "stop")  # whoever runs the batch again gets no further
            os.kill(task, signal.SIGKILL)
            self._wait_for(lambda: _is_gone(task), process)
            assert not commit.exists(), "the batch of a killed task is not done"
        finally:
            kill_session(process.pid)
            process.wait()
            for sleeper in asleep(self.folder):
                with suppress(ProcessLookupError):
                    os.kill(sleeper, signal.SIGKILL)
        assert not commit.exists()
        shutil.rmtree(self.operators / "sliding-1")

    def _wait_for(self, done: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        while not done():
            assert process.poll() is None
            time.sleep(0.01)

    def _elsewhere(self, what: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        script = f"from tests.processing.state import test_state_spark as t; t.{what}({str(self.folder)!r})"
        paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
        return subprocess.Popen(
            [sys.executable, "-c", script],
            env=variables or {**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )

    def kill_rebuilding(self) -> None:
        """Rebuilds the state in another process, which is killed as soon as it has written something of it."""
        process = self._elsewhere("main")
        try:
            begun = self.folder / "log/apps/auction/rebuild/pace/operators"
            while not any(begun.glob("*/*/*.state")):
                assert process.poll() is None
                time.sleep(0.002)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "log" / "apps" / "auction" / "checkpoints" / "pace"

    @property
    def operators(self) -> Path:
        return self.checkpoint / "operators"

    def check(self, over_s: int = 30, *, since: int = 0) -> None:
        """Each bid that the watermark has passed was given once, with what its key had in the time before it."""
        with hw.open_log(self.url) as log:
            given = log.read("bids", columns=["id", "who", "lot", "price", "at", "_partition"]).to_pylist()
            found = log.read("pace").to_pylist()
        reached: dict[int, datetime] = {}
        for row in given:
            reached[row["_partition"]] = max(reached.get(row["_partition"], row["at"]), row["at"])
        until = min(reached.values()) - LATENESS
        bids = {row["id"]: row for row in given}.values()
        assert Counter(row["id"] for row in found) == Counter(row["id"] for row in bids if row["at"] < until)
        for row in found:
            if row["id"] < since:
                continue
            near = [
                bid["price"] for bid in bids
                if (bid["who"], bid["lot"]) == (row["who"], row["lot"]) and row["at"] - timedelta(seconds=over_s) <= bid["at"] <= row["at"]
            ]  # fmt: skip
            assert (row["n"], row["most"]) == (len(near), max(near)), row

    def _bid(self) -> dict[str, Any]:
        self.number += 1
        at = NOON + timedelta(seconds=self.number)
        who = self.random.choice(["ann", "bob", None])
        return {
            "id": self.number,
            "who": who,
            "lot": self.random.choice([1, 2, None]),
            "price": self.random.randrange(99),
            "at": at,
        }


def test_another_number_of_partitions_goes_on_from_the_state(tmp_path: Path, spark: SparkSession) -> None:
    """And the state may be anywhere that pyarrow knows; checkpoints stay where they are."""
    auction, place = Auction(tmp_path, spark, 1), f"file://{tmp_path}/elsewhere"
    for partitions in (4, 3, 3):
        auction.feed()
        assert auction.run(state=place, state_partitions=partitions) is None
    auction.check()
    kept = sorted((tmp_path / "elsewhere").glob("auction/pace/*/*"))
    assert {path.parent.name for path in kept} == {"dedupe-1", "sliding-1"}
    assert {path.name.partition("-of-")[2] for path in kept} == {"00003"}, "the old ones go when they are not needed"
    assert not auction.operators.exists()
    with pytest.raises(InvalidApp, match="state_partitions=0"):
        auction.app(state_partitions=0)


@pytest.mark.covers("Pistachio", "Samza")
def test_the_state_of_a_killed_task_is_refused_where_it_is_lost_and_rebuilt_from_the_log(
    tmp_path: Path, spark: SparkSession
) -> None:
    """A task is killed in the middle of a batch, which is never committed, and the disk with its state is gone. Whoever rebuilds it is
    killed first: the state is refused as before. In the end nothing was given twice, and nothing is missing.

    The query begins behind events that retention has removed, so all that its state was made of is there.
    """
    auction = Auction(tmp_path, spark, 2)
    auction.feed()
    auction.trim()
    auction.feed(100)
    auction.kill_task()
    auction.feed()
    auction.kill_rebuilding()
    error = auction.run()
    assert error is not None
    assert "is missing" in error
    assert "--rebuild-state" in error
    assert auction.run(rebuild={"pace": "all"}, state_partitions=3) is None
    auction.check()
    assert not (tmp_path / "log/apps/auction/rebuild/pace").exists()


@pytest.mark.bench
def test_damaged_state_is_rebuilt_too(tmp_path: Path, spark: SparkSession) -> None:
    """A partition that was taken over alone, as a kill leaves it, is refused; rebuilt again it is whole."""
    auction = Auction(tmp_path, spark, 3)
    auction.feed()
    assert auction.run() is None
    damaged = max(auction.operators.glob("dedupe-1/*/*.state"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    auction.feed()
    assert "is damaged" in (auction.run() or "")
    assert auction.run(rebuild={"pace": "all"}) is None
    auction.check()
    shutil.rmtree(max(auction.operators.glob("sliding-1/*")))
    auction.feed()
    assert "is missing" in (auction.run() or "")
    assert auction.run(rebuild={"pace": "all"}) is None
    auction.check()


@pytest.mark.bench
def test_an_operator_with_other_settings_is_refused_until_its_state_is_rebuilt(
    tmp_path: Path, spark: SparkSession
) -> None:
    """What it gives from then on is as if it had always been so."""
    auction = Auction(tmp_path, spark, 4)
    auction.feed()
    assert auction.run() is None
    with hw.open_log(auction.url) as log:
        before = max(row["id"] for row in log.read("pace").to_pylist())
    auction.feed()
    assert "with other settings" in (auction.run(over_s=60) or "")
    assert auction.run(over_s=60, rebuild={"pace": "all"}) is None
    auction.check(60, since=before + 40)


@pytest.mark.bench
def test_what_cannot_be_rebuilt_is_told(tmp_path: Path, spark: SparkSession) -> None:
    """Events that retention has removed; a stage that is not there, has no operator, or has done no batch."""
    auction = Auction(tmp_path, spark, 5)
    auction.feed()
    assert auction.run(rebuild={"pace": "all"}) is None, "nothing to be rebuilt yet"
    with pytest.raises(InvalidApp, match="nobody"):
        auction.run(rebuild={"nobody": "all"})
    app = auction.app()
    app.sink("bids", to="copies", name="copied")
    with pytest.raises(InvalidApp, match="no operator of Headwater"):
        app.run(available_now=True, rebuild_state={"copied": "all"})
    with hw.open_log(auction.url) as log:
        log.alter_topic("bids", retention="1 second")
        time.sleep(1.1)
        log.tidy("bids")
    with pytest.raises(InvalidApp, match=r"retention has removed events of bids.*--rebuild-state pace=kept"):
        auction.run(rebuild={"pace": "all"})
    assert auction.run(rebuild={"pace": "kept"}) is None


KEYS: dict[str, list[Any]] = {
    "STRING": ["a", "", None, "ä", "a\x00b", "A"],
    "BIGINT": [0, -1, None, 2**63 - 1, -(2**63)],
    "DOUBLE": [0.0, -0.0, None, math.nan, -math.nan, math.inf, 1.5],
    "DECIMAL(20,2)": [Decimal("1.10"), None, Decimal("-1.10"), Decimal(0)],
    "BOOLEAN": [True, False, None],
    "DATE": [date(2026, 1, 31), None, date(1969, 12, 31)],
    "TIMESTAMP": [NOON, None, NOON + timedelta(microseconds=1)],
    "BINARY": [b"", b"\x00", None, b"a"],
}


def test_keys_of_every_type_are_told_apart(spark: SparkSession) -> None:
    """Nulls too, and in every place of a composite key; all zeros are one, and so are all NaN."""
    random = Random(5)
    for first, second in (*((kind, "STRING") for kind in KEYS), ("STRING", "DOUBLE")):
        keys = [(random.choice(KEYS[first]), random.choice(KEYS[second])) for _ in range(200)]
        rows = [(*key, number, NOON + timedelta(hours=number)) for number, key in enumerate(keys)]
        frame = spark.createDataFrame(rows, f"a {first}, b {second}, v BIGINT, at TIMESTAMP")
        found = hw.sliding(frame, by=["a", "b"], over="10000 hours", at="at", n="count").collect()
        expected = Counter(map(same, keys))
        assert Counter({same(row[:2]): row["n"] for row in sorted(found, key=lambda row: row["v"])}) == expected, first


def same(key: Any) -> tuple[Any, ...]:
    """A key as Python compares it."""
    return tuple(_plain(part) for part in key)


def _plain(part: Any) -> Any:
    if isinstance(part, float) and math.isnan(part):
        return "nan"
    if isinstance(part, datetime):
        return part.replace(tzinfo=None)
    return bytes(part) if isinstance(part, bytearray) else part


@pytest.mark.parametrize("kind", ["MAP<STRING, INT>", "ARRAY<INT>", "STRUCT<x: INT>"])
def test_nested_keys_are_refused(spark: SparkSession, kind: str) -> None:
    """Spark's hash leaves nulls inside them out."""
    frame = spark.createDataFrame([], f"k {kind}, at TIMESTAMP")
    with pytest.raises(InvalidInput, match="which cannot be a key"):
        hw.dedupe(frame, "k")


@pytest.mark.parametrize(("page", "count"), [("operators.md", 7), ("time.md", 3)])
def test_the_pages_program_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, count: int
) -> None:
    """What the pages show, from top to bottom, with the operator that is written there."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == count
    exec(compile("\n".join(blocks), f"docs/{page}", "exec"), {"__name__": "page"})


def _is_gone(process: int) -> bool:
    """Whether a process has ended; its parent may not have taken notice."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def run_on(folder: str) -> None:
    """What the process does whose tasks are killed."""
    Auction(Path(folder), None, 0).app().run()


def main(folder: str) -> None:
    """What the process does that is killed."""
    Auction(Path(folder), None, 0).run(rebuild={"pace": "all"})
