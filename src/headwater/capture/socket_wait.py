"""Waiting for a connection, with as many open files as a process may have: `select` knows only the first 1,024 of them."""

from __future__ import annotations

import select
from typing import Any


def is_readable(connection: Any, timeout_s: float) -> bool:
    """Whether something came, or the other side has ended it, within the time."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
