"""How a signal ends the demonstration: at once, or at the next tick, and never lost in a callback of the interpreter."""

from __future__ import annotations

import os
import signal
import weakref

import pytest

from headwater.cli.demo.termination import Termination


class Thing:
    """Something that is collected."""


def test_a_signal_ends_the_block_at_once() -> None:
    """Where nothing else is said; and the handlers of before are back."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, Termination().by_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("ticks", [True, False])
def test_a_signal_inside_a_callback_is_not_lost(*, ticks: bool) -> None:
    """What is raised there, Python ignores: it is raised at the next tick, or where the block ends."""
    termination, seen = Termination(), list[str]()
    thing: Thing | None = Thing()
    gone = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))

    def play() -> None:
        nonlocal thing
        with termination.by_signals(), termination.at_ticks():
            thing = None
            seen.append("went on")
            if ticks:
                termination.tick()
                seen.append("too far")

    with pytest.raises(SystemExit) as ended:
        play()
    assert gone() is None and ended.value.code == 143
    assert seen == ["went on"]
