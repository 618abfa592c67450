"""Troubles: what fails beside the stages of a running application, shown in its status until it works again.

A database that is away or a full disk must not end the thread that supervises the stages. It retries what failed with backoff.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from headwater.model.backoff import Backoff
from headwater.model.errors import HeadwaterError

AGAIN_S = (1.0, 30.0)
"""The first and the longest pause before a retry."""


class _Trouble(msgspec.Struct, frozen=True):
    why: str
    backoff: Backoff
    again_at: float


class Troubles:
    """What has failed, by what it was to do. Thread-safety: one thread attempts, any thread may read."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        backoff: Callable[[], Backoff] = lambda: Backoff(*AGAIN_S),
    ) -> None:
        self._clock = clock
        self._backoff = backoff
        self._found: dict[str, _Trouble] = {}

    @property
    def told(self) -> list[str]:
        """A sentence for each of them."""
        return [f"{what}. The application retries: {trouble.why}" for what, trouble in list(self._found.items())]

    def attempt(self, what: str, do: Callable[[], object]) -> None:
        """Does something, unless it failed a moment ago; `what` says what it means when it fails."""
        before = self._found.get(what)
        if before is not None and self._clock() < before.again_at:
            return
        try:
            do()
        except Exception as error:  # noqa: BLE001 - the status shows it
            backoff = self._backoff() if before is None else before.backoff
            again_at = self._clock() + backoff.next_s()
            why = f"[{error.code}] {error}" if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}"
            self._found[what] = _Trouble(why, backoff, again_at)
        else:
            self._found.pop(what, None)
