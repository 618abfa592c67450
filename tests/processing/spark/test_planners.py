"""Planners: the processes in which Spark plans streams rest while nothing comes, are forked, and end with their queries."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.log.log import Log
from headwater.processing.spark.planners import PLANNING
from headwater.processing.spark.worker_python import planners

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEN_S_MAX = 300.0
"""Long enough for a busy machine; what is claimed is what is seen, not when."""

REST_S = 3.0
SWITCHES_MAX = 30
"""A planner that Spark asks every 10 ms is switched to several hundred times while it should rest."""

FORKING = "headwater.processing.spark.planners"


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + SEEN_S_MAX
    while not done():
        assert time.monotonic() < deadline, f"not within {SEEN_S_MAX:g} s"
        time.sleep(0.05)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def planners_of(parent: int) -> list[int]:
    """The planners below a process, forked or not; the process that forks them is none."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
    below = {parent}
    while more := {pid for pid, above in parents.items() if above in below} - below:
        below |= more
    forks = {pid for pid in below if FORKING in command_of(pid) and FORKING in command_of(parents.get(pid, 0))}
    return sorted(forks | {pid for pid in below if PLANNING in command_of(pid)})


def switches(pid: int) -> int:
    """How often a process had to wait for something, in its main thread."""
    found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


class Shop:
    """An application that copies two topics into one, and the log that feeds it."""

    def __init__(self, log: Log, spark: SparkSession) -> None:
        self.log = log
        self.app = hw.App("shop", log=log.url, spark=spark)
        orders, returns = (
            self.app.topic(name, schema="id BIGINT", key="id", partitions=2) for name in ("orders", "returns")
        )

        def both(orders: DataFrame, returns: DataFrame) -> DataFrame:
            return orders.unionByName(returns)

        self.app.stream(orders, returns, to="both", key="id")(both)

    def put(self, topic: str, number: int) -> None:
        """Appends an event, and waits until it was copied."""
        self.log.append(topic, [{"id": number}])
        until(lambda: number in self.copied())

    def copied(self) -> list[int]:
        return [] if "both" not in self.log.topics() else self.log.read("both").column("id").to_pylist()


@pytest.fixture
def shop(tmp_path: Path, spark: SparkSession) -> Iterator[Shop]:
    with hw.open_log(tmp_path / "log") as log:
        yield Shop(log, spark)


@contextmanager
def running(shop: Shop) -> Iterator[None]:
    shop.app.start()
    try:
        yield
    finally:
        shop.app.stop()


def test_planners_rest_while_nothing_comes_and_go_on_when_something_does(shop: Shop) -> None:
    """Each input of a stage wakes it; while none has news, nobody asks for any. Planners are forks, and none outlives its query."""
    with running(shop):
        shop.put("orders", 0)
        shop.put("returns", 1)
        found = planners_of(os.getpid())
        assert len(found) == 2
        assert all(FORKING in command_of(pid) for pid in found)
        until(lambda: rests(found))
        shop.put("returns", 2)
        shop.put("orders", 3)
        assert planners_of(os.getpid()) == found
    until(lambda: not planners_of(os.getpid()))
    assert sorted(shop.copied()) == [0, 1, 2, 3]


def rests(pids: list[int]) -> bool:
    before = {pid: switches(pid) for pid in pids}
    time.sleep(REST_S)
    return all(switches(pid) - before[pid] <= SWITCHES_MAX for pid in pids)


def test_a_planner_that_is_killed_while_it_waits_is_replaced(shop: Shop) -> None:
    """Spark sees that its connection is closed, and the stage is started again."""
    with running(shop):
        shop.put("orders", 0)
        found = planners_of(os.getpid())
        until(lambda: rests(found))
        os.kill(found[0], signal.SIGKILL)
        shop.put("orders", 1)
        shop.put("returns", 2)
    assert sorted(shop.copied()) == [0, 1, 2]


def test_without_the_process_that_forks_spark_gets_a_python_for_each_source(shop: Shop) -> None:
    """It may be killed, as any process; what it has forked goes on."""
    forking = planners()
    assert forking is not None and forking.pid is not None
    with running(shop):
        shop.put("orders", 0)
        os.kill(forking.pid, signal.SIGKILL)
        shop.put("orders", 1)
    try:
        with running(shop):
            shop.put("orders", 2)
            assert all(PLANNING in command_of(pid) for pid in planners_of(os.getpid()))
    finally:
        forking.start()
    assert sorted(shop.copied()) == [0, 1, 2]
