"""A background thread: it is there at once, waited for to its end, and borne by forks and interrupts."""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress
from queue import SimpleQueue

import pytest

from headwater.log.disk.threads import Background
from tests.rigs.children import in_child
from tests.rigs.interrupts import interrupt_in, run_interrupted


def test_it_is_waited_for_to_its_end() -> None:
    go, done = SimpleQueue[None](), list[int]()

    def run() -> None:
        go.get()
        done.append(1)

    thread = Background(run)
    go.put(None)
    thread.join()
    thread.join()
    assert done == [1]


def test_a_thread_does_not_wait_for_itself() -> None:
    made = SimpleQueue[Background]()
    thread = Background(lambda: made.get().join())
    made.put(thread)
    thread.join()


def test_a_forked_process_does_not_wait_for_it() -> None:
    end = SimpleQueue[None]()
    thread = Background(end.get)
    in_child(thread.join)
    end.put(None)
    thread.join()


def test_one_that_fails_has_ended_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said: SimpleQueue[sys.UnraisableHookArgs] = SimpleQueue()
    monkeypatch.setattr(sys, "unraisablehook", said.put)

    def fail() -> None:
        raise OSError("the disk is full")

    Background(fail).join()
    assert str(said.get(timeout=10).exc_value) == "the disk is full"


def test_an_interrupt_at_any_instruction_is_borne() -> None:
    run_interrupted(work_interrupted)


def work_interrupted() -> None:
    chance, interrupted = random.Random(3), 0
    for _ in range(600):
        end = SimpleQueue[None]()
        threads: list[Background] = []
        try:
            try:
                interrupt_in(chance.uniform(0.00001, 0.0005))
                threads.append(Background(end.get))
                end.put(None)
                threads[0].join()
                time.sleep(0.0005)
            finally:
                interrupt_in(0)
        except KeyboardInterrupt:
            interrupted += 1
        with suppress(KeyboardInterrupt):
            end.put(None)
        for thread in threads:
            thread.join()
    assert interrupted > 50
