"""Crash points by what reaches them, and a process that ends itself at one of them.

`headwater.model.points` declares all points. A test that takes its points from here visits each one that is added later, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

from headwater.model.points import Watcher, check_point, points_of, watch

# What only some programs reach has rounds and histories of its own; writers and readers never come by there.
_WRITERS = (
    "append:", "sync:", "roll:", "open:", "create:", "delete:", "transaction:", "commit:", "settle:", "recovery:", "seal:",
)  # fmt: skip
_KEEPING = ("retention:", "compaction:", "archive:", "overload:")
_SHARED_BY_GAPS = (
    "roll: begun", "roll: created", "roll: written published", "seal: written", "seal: named", "retention: first published",
    "retention: given up", "retention: removed one",
)  # fmt: skip


def crash_points() -> list[str]:
    """Every point that appending, reading and sealing reach."""
    return points_of(*_WRITERS)


def rare_points() -> list[str]:
    """Every point to which only a failed sync or thousands of transactions lead."""
    return points_of("heal:", "records:")


def keeping_points() -> list[str]:
    """Every point of what keeps a topic small."""
    return points_of(*_KEEPING)


def queue_points() -> list[str]:
    """Every point that queues reach."""
    return points_of("queue:")


def queue_recovery_points() -> list[str]:
    """Every point that the first to open a queue after a power loss reaches."""
    return points_of("queue recovery:")


def group_points() -> list[str]:
    """Every point that members of groups reach."""
    return points_of("group:")


def stage_points() -> list[str]:
    """Every point that stages reach."""
    return points_of("stage:")


def heartbeat_points() -> list[str]:
    """Every point of heartbeats."""
    return points_of("heartbeat:")


def copy_points() -> list[str]:
    """Every point of backups and restores."""
    return points_of("backup:", "restore:")


def gap_points() -> list[str]:
    """Every point of placing events with gaps between their offsets, which is also a roll, a sealing and a retention."""
    return [*points_of("gap:"), *_SHARED_BY_GAPS]


def split_points() -> list[str]:
    """Every point of adding partitions to a topic."""
    return points_of("split:")


def replacing_points() -> list[str]:
    """The points of replacing a file as a whole, wherever that has no names of its own."""
    return points_of("replace:")


def removal_points() -> list[str]:
    """Every point at which a group or a queue is removed."""
    return points_of("removal:")


def at(point: str, act: Callable[[], object], nth: int = 1) -> Watcher:
    """A watcher of points that calls `act` where this one is reached for the nth time, once."""
    left = nth
    check_point(point)

    def count(reached: str) -> None:
        nonlocal left
        left -= reached == point
        if reached == point and left == 0:
            act()

    return count


def kill_at(point: str, nth: int = 1) -> None:
    """From now on this process kills itself, with SIGKILL, where it reaches the point for the nth time; nowhere if that is empty."""
    watch(at(point, kill_self, nth) if point else None)


def kill_self() -> NoReturn:
    """The process ends here, without any clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("A process outlived SIGKILL.")
