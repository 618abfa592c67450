"""The forecast of a topic: its growth, and the hours until it is full.

The rate is that of the last hour, or of a younger topic's whole life. There is no forecast for a topic without growth, nor
for one that keeps events only until they are acknowledged and has none older than an hour, because it is drained as it fills.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headwater.model.clock import Clock, system_clock

if TYPE_CHECKING:
    from headwater.log.log import Log
    from headwater.log.port.topic import Topic

WINDOW_US = 3_600_000_000
_HOUR_US = 3_600_000_000


def forecast(log: Log, name: str, *, bytes_on_disk: int | None, clock: Clock = system_clock) -> dict[str, Any]:
    """Events and bytes a second; the hours until the topic or its disk is full; those until a reader that stops now is overtaken."""
    topic, now_us = log.topic(name), clock()
    window_us = min(WINDOW_US, max(1_000_000, now_us - topic.created))
    held = log.offsets(name)
    since = log.offsets_at(name, now_us - window_us, by="appended")
    events = sum(len(offsets) for offsets in held.values())
    rate = sum(offsets.stop - since[number] for number, offsets in held.items()) / (window_us / 1e6)
    reserved = _reserved_bytes(log, topic)
    used = None if bytes_on_disk is None else bytes_on_disk - reserved
    byte_rate = None if used is None or not events else rate * used / events
    room = _room_bytes(log, topic, used, reserved)
    if topic.retain == "until_acked" and all(offsets.start >= since[number] for number, offsets in held.items()):
        room = None
    return {
        "events_per_s": round(rate, 3),
        "bytes_per_s": None if byte_rate is None else round(byte_rate, 1),
        "hours_to_full": _hours(room, byte_rate),
        "hours_to_overtaken": _hours_to_overtaken(topic, byte_rate),
    }


def _room_bytes(log: Log, topic: Topic, used: int | None, reserved: int) -> int | None:
    """What the topic's own limit and the disk leave; a topic that retention keeps below both never fills them.

    With overload="buffer" there is the buffer beside the limit, and what is set aside for it (see `reserve`) beside the free disk.
    """
    scheme, _, folder = log.url.partition("://")
    if scheme != "file" or used is None or not os.path.isdir(folder):
        return None
    room = shutil.disk_usage(folder).free + reserved
    if topic.bytes_max is not None and topic.overload != "drop_oldest":
        limit = topic.bytes_max + (topic.buffer_bytes if topic.overload == "buffer" else 0)
        room = min(room, max(0, limit * topic.partitions - used))
    kept = _kept_bytes(topic)
    return None if kept is not None and kept - used < room else room


def _reserved_bytes(log: Log, topic: Topic) -> int:
    """What its partitions have set aside for a burst: it counts as used on the disk, but is room."""
    folder, total = log.url.partition("://")[2], 0
    for number in range(topic.partitions):
        with suppress(OSError):
            total += os.path.getsize(f"{folder}/topics/{topic.name}/{number}/reserve")
    return total


def _kept_bytes(topic: Topic) -> int | None:
    """How large a topic grows before its oldest events go."""
    limits = [topic.retention_bytes, topic.bytes_max if topic.overload == "drop_oldest" else None]
    found = [limit * topic.partitions for limit in limits if limit is not None]
    return min(found, default=None)


def _hours_to_overtaken(topic: Topic, byte_rate: float | None) -> float | None:
    limits = [] if topic.retention_us is None else [topic.retention_us / _HOUR_US]
    kept = _kept_bytes(topic)
    if kept is not None:
        limits.append(_hours(kept, byte_rate) or float("inf"))
    found = min(limits, default=float("inf"))
    return None if found == float("inf") else round(found, 2)


def _hours(room_bytes: int | None, byte_rate: float | None) -> float | None:
    if room_bytes is None or not byte_rate:
        return None
    return round(room_bytes / byte_rate / 3600, 2)
