"""The gate of a log: a close waits for everybody inside, and no thread passes it twice, or it would leave before it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.disk.gate import Gate, _stay
from headwater.model.errors import Closed
from headwater.model.marker import Marker


def test_a_close_waits_for_all_that_are_inside() -> None:
    """Whoever comes later is told; who stays may pass again and again meanwhile."""
    gate, leave, done = Gate("It", "Open it again."), threading.Event(), []
    inside = threading.Barrier(4)

    def use() -> None:
        with gate:
            inside.wait(20)
            leave.wait(20)
            done.append("used")

    def stay() -> None:
        with gate.staying():
            inside.wait(20)
            for _ in range(3):
                with gate:
                    leave.wait(20)
            done.append("stayed")

    threads = [threading.Thread(target=work) for work in (use, use, stay)]
    for thread in threads:
        thread.start()
    inside.wait(20)
    closing = threading.Thread(target=lambda: (gate.close(), done.append("closed")))
    closing.start()
    while not gate._closed:
        time.sleep(0.001)
    with pytest.raises(Closed, match="It was closed"), gate:
        pass
    assert done == []
    leave.set()
    for thread in (*threads, closing):
        thread.join(20)
    assert sorted(done[:-1]) == ["stayed", "used", "used"] and done[-1] == "closed"
    assert gate.close() is False


@pytest.fixture
def passed_twice(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What passed a gate that its thread was inside of already."""
    found: list[str] = []
    enter = Gate.__enter__

    def watched(gate: Gate) -> None:
        if threading.get_ident() in gate._inside and _stay() not in gate._inside:
            found.append(f"{gate._what} by {threading.current_thread().name}")
        enter(gate)

    monkeypatch.setattr(Gate, "__enter__", watched)
    return found


def test_no_thread_passes_twice(tmp_path: Path, passed_twice: list[str]) -> None:
    """In anything that a log does, a keeper's work and a stranger's backup included."""
    log = hw.open_log(tmp_path / "log")
    log.create_topic(
        "t", "k STRING, n INT, at TIMESTAMP", key="k", time="at", partitions=2, compact=True, segment_bytes=4096
    )
    log.create_topic("out", "n INT", archive=str(tmp_path / "archive"), retention_bytes=4096, segment_bytes=4096)
    log.create_topic("tasks", retain="until_acked")
    rows = [{"k": f"k{n % 9}", "n": n} for n in range(200)]

    def work_on_queue() -> None:
        with log.queue("tasks") as queue, log.transaction() as unit:
            unit.ack(queue.lease(timeout_s=0))
            unit.append("out", [{"n": 1}])

    def consume() -> None:
        with log.consumer("t", group="g", commit="manual") as consumer, log.transaction() as transaction:
            transaction.append("out", [{"n": event.value["n"]} for event in consumer.poll()])
            transaction.commit_offsets(consumer)
        log.reset_group("g", to="latest")
        log.delete_group("g")

    def stage() -> None:
        number = log.store.take_stage("s")
        log.store.commit_stage("s", number, Marker(query="q", epoch=0, stage="s"), [])
        log.store.stage_state("s")

    works: list[Callable[[], object]] = [
        lambda: log.append("t", rows),
        lambda: log.append("out", [{"n": n} for n in range(500)]),
        lambda: log.append("tasks", [b"x"] * 10),
        lambda: log.alter_topic("t", partitions=4),
        lambda: [log.seal(name) for name in log.topics()],
        lambda: [log.tidy(name) for name in log.topics()],
        lambda: [log.offsets_at("t", 0, by=by) for by in ("time", "appended")],
        lambda: (log.read("t"), log.table("t"), log.read("out")),
        work_on_queue,
        consume,
        stage,
        lambda: log.backup(tmp_path / "backup"),
        lambda: log.mirror(tmp_path / "copy"),
        lambda: log.delete_topic("out"),
    ]
    for _ in range(2):
        for work in works[:-1]:
            work()
    works[-1]()
    log.close()
    assert passed_twice == []
