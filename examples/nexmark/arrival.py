"""An arrival: the order in which events come, which need not be the order in which they happened.

Event `n` arrives at place `n + delay(n)`. A delay of at most the lateness makes nobody late: whatever came before happened at most that
much later. The share `late` of the events is delayed by two to four times the lateness, so that as a rule something of the same
partition that is newer by more than the lateness came before them; whether it did is for the partition to say (`_late`), not for us.

Delays are draws, so the events of any range of places are found without looking at the others, and ranges compose.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from examples.nexmark.draws import Draws, Numbers


@dataclasses.dataclass(frozen=True)
class Arrival:
    """The order of the events from number `first` to below `last`.

    `lateness_events` is the lateness divided by the time between two events. With neither `shuffled` nor `late` they come in the
    order in which they happened.
    """

    first: int
    last: int
    seed: int = 0
    lateness_events: int = 0
    shuffled: bool = False
    late: float = 0.0

    @property
    def end(self) -> int:
        """The place behind the last that an event can have; the first is the number of the first event."""
        return self.last + self._delay_max

    def numbers(self, start: int, end: int) -> Numbers:
        """The numbers of the events at the places from `start` to below `end`, in the order in which they arrive."""
        numbers = np.arange(max(self.first, start - self._delay_max), min(self.last, end), dtype=np.int64)
        places = numbers + self.delays(numbers)
        inside = (places >= start) & (places < end)
        return numbers[inside][np.argsort(places[inside], kind="stable")]

    def delays(self, numbers: Numbers) -> Numbers:
        """By how many events each of these is delayed."""
        draws, lateness = Draws(self.seed), self.lateness_events
        delays = draws.below(lateness + 1, "delay", numbers) if self.shuffled else np.zeros_like(numbers)
        if self.late:
            long = 2 * lateness + 1 + draws.below(2 * lateness + 1, "long delay", numbers)
            delays = np.where(self.is_delayed(numbers), long, delays)
        return delays

    def is_delayed(self, numbers: Numbers) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of these events come later than the lateness allows."""
        return Draws(self.seed).chance(self.late, "late", numbers)

    @property
    def _delay_max(self) -> int:
        if self.late:
            return 4 * self.lateness_events + 1
        return self.lateness_events if self.shuffled else 0
