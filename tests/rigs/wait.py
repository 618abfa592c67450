"""A wait for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_LOOK_S = 0.01


def wait_until(is_so: Callable[[], Any], *, seconds: float = 60.0) -> None:
    """Looks again and again until something is so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"it was not so within {seconds:g} s"
        time.sleep(_LOOK_S)
