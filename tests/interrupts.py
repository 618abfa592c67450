"""Ctrl-C at a random instruction, as tests ask for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Lets `signal.setitimer(signal.ITIMER_REAL, …)` raise KeyboardInterrupt wherever the program stands."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
