"""A unit of work: leases of any number of queues, acknowledged together with what a transaction appends, or not at all.

The acknowledgements are events of the same atomic append: one for each partition, in the topic `<topic>.<group>.acks` (partition
u64, token u64, then the offsets). The locks of all windows concerned are held from the moment the leases are checked until the
windows are told. Before the append each window notes where in that topic the acknowledgement will stand or later; whoever
next holds its lock and finds the note knows that its writer is dead, looks there, and does what was committed.

A power loss may take back what windows were told. So an acknowledgement is kept in that topic until the floor of its window is past
it, on disk (see `floor`), and whoever opens a window after a power loss does again what the topic says (see `partition`).
A dead letter is such a unit, too: it is written together with the acknowledgement of the event that it was, whose token is 0.

Lock order: the windows' locks in the order of (topic, group, partition), then the locks of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headwater.log.arrow.rows import to_batch
from headwater.log.disk.gate import Held, hold, leave
from headwater.log.port.group import OffsetPart
from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.log.queue.lease import Lease
from headwater.log.queue.state import QueueStates
from headwater.log.queue.window import Window
from headwater.model.errors import LeaseExpired

if TYPE_CHECKING:
    from headwater.log.log import Log
    from headwater.log.queue.queue import Queue

Place = tuple[str, str, int]

_SEGMENT_BYTES = 1 << 20


def commit_work(
    log: Log, writes: Sequence[Write], leases: Iterable[Lease], *, offsets: Sequence[OffsetPart] = ()
) -> list[range]:
    """Appends everything and acknowledges the leases as one; `LeaseExpired` leaves everything as it was."""
    work = _by_place(leases)
    notes = {(topic, group): acks_topic(log, topic, group) for topic, group, _ in work}
    acks = []
    held: Held = []
    windows = []
    try:
        for place in sorted(work):
            queue, tokens = work[place]
            window = hold(held, queue._part(place[2]).locked())
            assert window is not None
            for token, leased in tokens.items():
                if not window.holds(np.array(leased, np.int64), token).all():
                    raise LeaseExpired(
                        f"A lease of partition {place[2]} of topic {place[0]!r} had expired: nothing was appended.",
                        advice="Lease again, and give more time with lease_s= or lease.extend(…).",
                    )
            windows.append((window, place))
        ends = {names: log.store.bounds([note.name])[note.name, 0].end for names, note in notes.items()}
        for window, (topic, group, number) in windows:
            queue, tokens = work[topic, group, number]
            begin_counting(window, queue._states, number, end=ends[topic, group])
            window.acks_from = ends[topic, group] + 1
            rows = [encoded(number, token, leased) for token, leased in tokens.items()]
            note = notes[topic, group]
            acks.append(Write(note, 0, to_batch(rows, note.schema)))
        states = next(iter(work.values()))[0]._states
        states.reach("queue: unit begun")
        spans = log.store.write_atomically([*writes, *acks], offsets)
        states.reach("queue: unit committed")
        for window, place in windows:
            for leased in work[place][1].values():
                window.settle(np.array(leased, np.int64))
            window.acks_from = 0
    finally:
        try:
            leave(held)
        finally:
            held.clear()
    return spans[: len(writes)]


def acks_name(topic: str, group: str) -> str:
    """The topic of a group's acknowledgements in transactions."""
    return f"{topic}.{group}.acks"


def begin_counting(window: Window, states: QueueStates, number: int, *, end: int) -> None:
    """From the first unit of work on the topic of acknowledgements speaks of a window: from `end` on. The caller holds its lock."""
    if not window.acks_since:
        window.acks_since = end + 1
        states.sync(number)


def encoded(number: int, token: int, offsets: Iterable[int]) -> bytes:
    """One acknowledgement: partition, token and offsets."""
    return np.array([number, token, *offsets], np.uint64).tobytes()


def decoded(value: bytes) -> tuple[int, int, Any]:
    """Partition, token and offsets of one acknowledgement."""
    words = np.frombuffer(value, np.uint64)
    return int(words[0]), int(words[1]), words[2:].astype(np.int64)


def _by_place(leases: Iterable[Lease]) -> dict[Place, tuple[Queue, dict[int, list[int]]]]:
    work: dict[Place, tuple[Queue, dict[int, list[int]]]] = {}
    for lease in leases:
        grant = lease._grant
        place = (grant.queue.topic, grant.queue.group, grant.partition)
        tokens = work.setdefault(place, (grant.queue, {}))[1]
        tokens.setdefault(grant.token, []).append(lease.event.offset)
    return work


def acks_topic(log: Log, topic: str, group: str) -> Topic:
    """That topic, made where it is missing."""
    name = acks_name(topic, group)
    note = log.create_topic(
        name,
        partitions=1,
        durability=log.store.topic(topic).durability,
        segment_bytes=_SEGMENT_BYTES,
        retain="until_acked",
        exist_ok=True,
    )
    return note if note.retain == "until_acked" else log.alter_topic(name, retain="until_acked")
