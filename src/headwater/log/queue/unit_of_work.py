"""A unit of work: leases of any number of queues, acknowledged together with what a transaction appends, or not at all.

The acknowledgements are events of the same atomic append: one for each partition and lease, in the topic of the group's
acknowledgements (see `acks_topic`). The locks of all windows concerned are held from the moment the leases are checked until the
windows are told. Before the append each window notes where in that topic the acknowledgement will stand, or later. Whoever
holds its lock next and finds the note knows that its writer is dead, looks there, and does what was committed.

A dead letter is such a unit, too: it is written together with the acknowledgement of the event that it was, whose token is 0.

Lock order: the windows' locks in the order of (topic, group, partition), then the locks of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headwater.log.arrow.rows import to_batch
from headwater.log.disk.gate import Held, hold, leave
from headwater.log.port.group import OffsetPart
from headwater.log.port.write import Write
from headwater.log.queue.acks_topic import acks_topic, encoded
from headwater.log.queue.lease import Grants, Lease, grant_of, list_of_leases
from headwater.log.queue.partition import QueuePartition
from headwater.log.queue.queue_log import QueueLog
from headwater.log.queue.window_engine import engine_with_windows
from headwater.model.errors import LeaseExpired

Place = tuple[str, str, int]
Work = dict[Place, tuple[QueuePartition, dict[int, list[int]]]]
"""By topic, group and partition: the offsets of each token."""


def checked_leases(leases: Iterable[Lease]) -> list[Lease]:
    """The leases that a user gives to a transaction; refuses those of queues that take no part in one."""
    some = list_of_leases(leases)
    for grants in _handles(some):
        grants.engine.features.check("tx.ack")
    return some


def commit_work(
    log: QueueLog, writes: Sequence[Write], leases: Sequence[Lease], *, offsets: Sequence[OffsetPart] = ()
) -> list[range]:
    """Appends everything and acknowledges the leases as one; `LeaseExpired` leaves everything as it was."""
    work = _by_place(leases)
    notes = {(topic, group): acks_topic(log, topic, group) for topic, group, _ in work}
    acks = []
    held: Held = []
    windows = []
    try:
        for place in sorted(work):
            part, tokens = work[place]
            window = hold(held, part.locked())
            assert window is not None
            for token, leased in tokens.items():
                if not window.holds(np.array(leased, np.int64), token).all():
                    raise LeaseExpired(
                        f"A lease of partition {place[2]} of topic {place[0]!r} expired before the commit. Nothing was appended.",
                        advice="Lease again, and allow more time with lease_s= or lease.extend(…).",
                    )
            windows.append((window, place))
        ends = {names: log.store.bounds([note.name])[note.name, 0].end for names, note in notes.items()}
        for window, (topic, group, number) in windows:
            part, tokens = work[topic, group, number]
            part.begin_unit(window, end=ends[topic, group])
            rows = [encoded(number, token, leased) for token, leased in tokens.items()]
            note = notes[topic, group]
            acks.append(Write(note, 0, to_batch(rows, note.schema)))
        first = next(iter(work.values()))[0]
        first.reach("queue: unit begun")
        spans = log.store.write_atomically([*writes, *acks], offsets)
        first.reach("queue: unit committed")
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


def tell_committed(leases: Sequence[Lease]) -> None:
    """Tells the handles of leases that a transaction has acknowledged them."""
    for grants in _handles(leases):
        grants.committed([lease for lease in leases if grant_of(lease).grants is grants])


def _handles(leases: Iterable[Lease]) -> set[Grants]:
    return {grant_of(lease).grants for lease in leases}


def _by_place(leases: Iterable[Lease]) -> Work:
    work: Work = {}
    for lease in leases:
        grant = grant_of(lease)
        queue = grant.grants.queue
        place = (queue.topic, queue.group, grant.partition)
        if place not in work:
            work[place] = (engine_with_windows(grant.grants.engine, "tx.ack").partition(grant.partition), {})
        work[place][1].setdefault(grant.token, []).append(lease.event.offset)
    return work
