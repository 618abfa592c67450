"""Capabilities: what not every store can do. Callers ask for them, never which store it is."""

from __future__ import annotations

import msgspec

from headwater.log.port.lease_engine import QueueFeatures


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What one store can do; each answers a question that callers have."""

    folder: str | None = None
    """The folder in which its files lie, at hand for every process of this machine; None where there is none."""
    is_placed_by_key: bool
    """Whether every event lies in the partition that its key says. Elsewhere programs that are not ours may put it anywhere."""
    tells_lateness: bool
    """Whether it knows at any offset how far event time had come, and takes heartbeats: then anybody can say which events are late."""
    takes_offsets: bool
    """Whether a write can say at which offset it goes (`Write.at`, `place`), and a named producer costs no offsets."""
    queues: QueueFeatures = QueueFeatures()
    """What its queues can do."""
