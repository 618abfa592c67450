"""The terminal: whether stdout is one, and text that is safe to show there.

Unprintable characters are escaped (`printable`), so that the content of a topic cannot control the terminal.
"""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def printable(text: str) -> str:
    """The text with unprintable characters escaped; line breaks stay."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


@contextmanager
def quiet_keys() -> Iterator[None]:
    """Keeps Ctrl-C from printing `^C` into the live table."""
    try:
        before = termios.tcgetattr(sys.stdin)
        in_front = os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (termios.error, ValueError, OSError):
        in_front = False
    if not in_front:  # a job in the background would be stopped for touching the terminal
        yield
        return
    quiet = [*before]
    quiet[3] = before[3] & ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
