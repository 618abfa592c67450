"""The depth of a queue: what is not acknowledged, counted and shown without leasing any of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from headwater.log.arrow.events import to_events
from headwater.log.port.store import Bounds
from headwater.log.queue.headers import delivery_times
from headwater.log.queue.partition import QueuePartition
from headwater.log.queue.window import LEASED, READY
from headwater.model.event import Event

EntryState = Literal["ready", "leased", "scheduled"]

FRESH_COUNTED_MAX = 65_536
"""So many events that nobody has looked at yet are looked at for their time in each partition; the rest count as ready."""

Parts = Iterable[tuple[QueuePartition, Bounds]]


class Depth(msgspec.Struct, frozen=True):
    """How many events of a queue are to be delivered, are out, wait for their time, and are dead letters."""

    ready: int
    leased: int
    scheduled: int
    dead: int


class QueueEntry(msgspec.Struct, frozen=True):
    """An event that is not acknowledged, as browsing shows it; `due_us` is when it may be delivered (again)."""

    event: Event
    state: EntryState
    deliveries: int
    due_us: int


def browse(parts: Parts, *, events_max: int, now: int) -> list[QueueEntry]:
    """The first events that are not acknowledged, partition after partition."""
    found: list[QueueEntry] = []
    for part, bounds in parts:
        entries, chunks, _ = part.waiting(bounds, fresh_max=events_max - len(found))
        entries = entries[: events_max - len(found)]
        events = {event.offset: event for event in part.events_at([entry[0] for entry in entries])}
        for offset, state, deliveries, due in entries:
            if offset in events:
                found.append(QueueEntry(events[offset], _state(state, due, now), deliveries, due))
        for chunk in chunks:
            times, skipped = delivery_times(chunk).tolist(), part.is_skipped(chunk).tolist()
            for event, due, skip in zip(to_events(chunk), times, skipped, strict=True):
                if not skip:
                    found.append(QueueEntry(event, _state(READY, due, now), 0, due))
        if len(found) >= events_max:
            break
    return found[:events_max]


def count(parts: Parts, *, now: int, dead: int) -> Depth:
    """How many there are of each kind."""
    counts: Counter[str] = Counter()
    for part, bounds in parts:
        entries, chunks, start = part.waiting(bounds, fresh_max=FRESH_COUNTED_MAX)
        counts.update(_state(state, due, now) for _, state, _, due in entries)
        looked_at = 0
        for chunk in chunks:
            waits = ~part.is_skipped(chunk)
            later = int(((delivery_times(chunk) > now) & waits).sum())
            counts["scheduled"] += later
            counts["ready"] += int(waits.sum()) - later
            looked_at += chunk.batch.num_rows
        counts["ready"] += max(0, bounds.end - start - looked_at)
    return Depth(counts["ready"], counts["leased"], counts["scheduled"], dead)


def _state(state: int, due: int, now: int) -> EntryState:
    if due <= now:
        return "ready"
    return "leased" if state == LEASED else "scheduled"
