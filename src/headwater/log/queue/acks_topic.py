"""The topic of a group's acknowledgements in transactions, `<topic>.<group>.acks`: what units of work and dead letters have settled.

Format of an event's value: u64 words, little-endian: the partition, the token of the lease (0 for a dead letter), then the offsets.

An acknowledgement stands in the same atomic append as what was appended with it. A power loss may take back what windows
were told, and then they are told again from here. So an acknowledgement is kept until the floor of its window is past it, on
disk (see `floor`).

Invariant: a window notes on disk from where on the topic speaks of it before the first acknowledgement that counts by it.

Thread-safety: functions without state, except `begin_counting`, whose caller holds the window's lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from headwater.log.port.topic import Topic
from headwater.log.queue.queue_log import QueueLog
from headwater.log.queue.window import Window
from headwater.log.queue.window_store import WindowStore

_SEGMENT_BYTES = 1 << 20


def acks_name(topic: str, group: str) -> str:
    """The name of that topic."""
    return f"{topic}.{group}.acks"


def acks_topic(log: QueueLog, topic: str, group: str) -> Topic:
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


def encoded(number: int, token: int, offsets: Iterable[int]) -> bytes:
    """One acknowledgement: partition, token and offsets."""
    return np.array([number, token, *offsets], np.uint64).tobytes()


def decoded(value: bytes) -> tuple[int, int, Any]:
    """Partition, token and offsets of one acknowledgement."""
    words = np.frombuffer(value, np.uint64)
    return int(words[0]), int(words[1]), words[2:].astype(np.int64)


def begin_counting(window: Window, windows: WindowStore, number: int, *, end: int) -> None:
    """From the first unit of work on the topic speaks of a window: from `end` on. The caller holds the window's lock."""
    if not window.acks_since:
        window.acks_since = end + 1
        windows.sync(number)
