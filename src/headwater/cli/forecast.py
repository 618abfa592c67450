"""The forecast of a topic: how fast it grows, and for how many hours there is room.

From the events of the last hour, or of a younger topic's whole life. A rate of nothing gives no forecast.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from headwater.model.clock import Clock, system_clock

if TYPE_CHECKING:
    from headwater.log.log import Log
    from headwater.log.topic import Topic

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
    byte_rate = None if bytes_on_disk is None or not events else rate * bytes_on_disk / events
    return {
        "events_per_s": round(rate, 3),
        "bytes_per_s": None if byte_rate is None else round(byte_rate, 1),
        "hours_to_full": _hours(_room_bytes(log, topic, bytes_on_disk), byte_rate),
        "hours_to_overtaken": _hours_to_overtaken(topic, byte_rate),
    }


def _room_bytes(log: Log, topic: Topic, bytes_on_disk: int | None) -> int | None:
    """What the topic's own limit and the disk leave; a topic that retention keeps below both never fills them."""
    scheme, _, folder = log.url.partition("://")
    if scheme != "file" or bytes_on_disk is None or not os.path.isdir(folder):
        return None
    room = shutil.disk_usage(folder).free
    if topic.bytes_max is not None:
        room = min(room, max(0, topic.bytes_max * topic.partitions - bytes_on_disk))
    if topic.retention_bytes is not None and topic.retention_bytes * topic.partitions - bytes_on_disk < room:
        return None
    return room


def _hours_to_overtaken(topic: Topic, byte_rate: float | None) -> float | None:
    limits = [] if topic.retention_us is None else [topic.retention_us / _HOUR_US]
    if topic.retention_bytes is not None:
        limits.append(_hours(topic.retention_bytes * topic.partitions, byte_rate) or float("inf"))
    found = min(limits, default=float("inf"))
    return None if found == float("inf") else round(found, 2)


def _hours(room_bytes: int | None, byte_rate: float | None) -> float | None:
    if room_bytes is None or not byte_rate:
        return None
    return round(room_bytes / byte_rate / 3600, 2)
