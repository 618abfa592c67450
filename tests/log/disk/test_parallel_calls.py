"""Calls side by side: all are done when the caller gets on, whatever fails and whenever it is interrupted."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from headwater.log.disk import threads as side_by_side
from headwater.log.disk.threads import SideBySide
from tests.rigs.interrupts import interrupt_in, run_interrupted


def test_calls_wait_at_the_same_time() -> None:
    """Each for all the others: one after the other they would wait for ever."""
    together = SideBySide(3)
    for _ in range(3):
        barrier = threading.Barrier(3)
        together.run([lambda: barrier.wait(10) and None] * 3)  # noqa: B023
    together.close()


def test_more_calls_than_threads_are_all_done() -> None:
    done: list[int] = []
    together = SideBySide(2)
    together.run([lambda number=number: done.append(number) for number in range(20)])  # type: ignore[misc]
    assert sorted(done) == list(range(20))
    together.close()
    together.run([lambda: done.append(20), lambda: done.append(21)])
    assert len(done) == 22


def test_a_failure_is_raised_when_all_are_done() -> None:
    """The caller's own call before those of others."""
    done = threading.Event()

    def slow() -> None:
        time.sleep(0.1)
        done.set()

    def fail() -> None:
        raise OSError("the disk is full")

    together = SideBySide(3)
    for calls in ([fail, slow], [slow, fail]):
        done.clear()
        with pytest.raises(OSError, match="full"):
            together.run(calls)
        assert done.is_set()


def test_a_forked_process_has_threads_of_its_own() -> None:
    together, done = SideBySide(2), list[int]()
    together.run([lambda: done.append(1)] * 2)
    if (child := os.fork()) == 0:
        together.run([lambda: done.append(2)] * 2)
        os._exit(len(done))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


def test_without_a_thread_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "start_new_thread", refuse)
    done: list[int] = []
    SideBySide(2).run([lambda: done.append(threading.get_ident())] * 3)
    assert done == [threading.get_ident()] * 3


def refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_an_interrupt_at_any_instruction_leaves_no_thread_at_work() -> None:
    """What was begun is done when it comes out, and the next calls are done as ever."""
    run_interrupted(work_interrupted, 600)


def work_interrupted(times: int) -> None:
    together, working = SideBySide(3), list[int]()

    def work() -> None:
        working.append(1)
        time.sleep(0.0002)
        working.pop()

    for _ in interrupted(together, work, times):
        assert not working
    together.run([work] * 4)


def test_an_interrupt_at_any_instruction_is_borne_without_threads() -> None:
    run_interrupted(work_alone_interrupted, 600)


def work_alone_interrupted(times: int) -> None:
    together, done = SideBySide(3), list[int]()
    side_by_side.start_new_thread = refuse  # type: ignore[attr-defined]
    for _ in interrupted(together, lambda: time.sleep(0.0002), times):
        pass
    together.run([lambda: done.append(1)] * 4)
    assert done == [1] * 4


def interrupted(together: SideBySide, work: Callable[[], None], times: int) -> Iterator[None]:
    """Yields after each run of three such calls, most of which were interrupted."""
    chance, count = random.Random(3), 0
    for _ in range(times):
        try:
            try:
                interrupt_in(chance.uniform(0.00001, 0.0008))
                together.run([lambda: None, work, work, work])
            finally:
                interrupt_in(0)
        except KeyboardInterrupt:
            count += 1
        yield
    assert count > times / 12
