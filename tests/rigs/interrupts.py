"""Ctrl-C at a random instruction: what is interrupted runs in a process of its own, so that one which waits for ever is a failed test that
says where each of its threads stands, and nothing but the work itself is interrupted."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
GIVEN_UP_S = 90  # before the time of a test is over


def run_interrupted(work: Callable[..., None], *arguments: object) -> None:
    """Calls a function of a test module in another process, where `interrupt_in` interrupts it; fails if it fails there."""
    module, paths = work.__module__, os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    program = f"import {module}; from tests.rigs import interrupts; interrupts.prepare(); {module}.{work.__name__}(*{arguments!r})"
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


def prepare() -> None:
    """What the other process does first."""
    faulthandler.dump_traceback_later(GIVEN_UP_S, exit=True)
    signal.signal(signal.SIGALRM, _interrupt)


def interrupt_in(seconds: float) -> None:
    """Raises KeyboardInterrupt when that time has passed, wherever the program stands then; 0 takes it back."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
