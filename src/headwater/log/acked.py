"""What of a topic its queues are done with: the place below which no queue group needs an event any more.

Asked by whoever frees the segments of a topic with `retain="until_acked"`. It is read from the windows without their locks: a floor
is one aligned word and only moves over what was acknowledged, so what is read is true, if perhaps a moment old. A window that
was not put in order since a power loss is believed only as far as the log itself was not set back. A group whose window cannot be
read, or that has none yet, needs everything.

The topic of acknowledgements of a group's units of work (see `queue_work`) is done with up to the first unit that a window still
has noted as half done. Its end has to be asked for before the windows: a unit that is noted later stands behind it.

Thread-safety: may be used by many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from headwater.log.disk import Disk
from headwater.log.queue_states import MemoryStates, local_queues
from headwater.log.queue_window import Window, opened_window
from headwater.log.queue_work import acks_name
from headwater.log.topic import Topic
from headwater.model.errors import HeadwaterError

Lost = Callable[[int], int | None]
"""The first offset that unclean stops took back since an incarnation."""


class Acked(msgspec.Struct, frozen=True):
    """No queue group needs an event below `end` that was appended longer than `ids_us` ago: its id may come again till then."""

    end: int
    ids_us: int = 0


def acked_in_folder(disk: Disk, folder: str, topic: Topic, number: int, *, end: int, lost_after: Lost) -> Acked | None:
    """What the queues of a local log are done with in a partition that ends at `end`; None where there is no queue."""
    found: list[Acked] = []
    for made in local_queues(disk, folder):
        where = f"{folder}/{made['group']}/{made['topic']}"
        if made["topic_id"] == topic.id:
            floor = _with_window(disk, f"{where}/{number}.window", lambda window: _floor(window, topic, lost_after))
            found.append(Acked(floor or 0, _ids_us(made)))
        elif acks_name(made["topic"], made["group"]) == topic.name:
            names = [name for name in disk.names(where) if name.endswith(".window")]
            notes = [_with_window(disk, f"{where}/{name}", lambda window: window.acks_from) for name in names]
            found.append(_applied(notes, end))
    return _least(found)


def acked_in_memory(queues: Iterable[MemoryStates], topic: Topic, number: int, *, end: int) -> Acked | None:
    """The same for a log in memory."""
    found: list[Acked] = []
    for states in queues:
        made = states.made
        if made is None:
            continue
        windows = states.windows()
        if made["topic_id"] == topic.id:
            found.append(Acked(windows[number].floor if number in windows else 0, _ids_us(made)))
        elif acks_name(made["topic"], made["group"]) == topic.name:
            found.append(_applied([window.acks_from for window in windows.values()], end))
    return _least(found)


def _floor(window: Window, topic: Topic, lost_after: Lost) -> int:
    if window.topic_id != topic.id:
        return 0
    lost = lost_after(window.incarnation)
    return window.floor if lost is None else min(window.floor, lost)


def _applied(notes: Iterable[int | None], end: int) -> Acked:
    """Every unit below was applied; a window that cannot be read may need all of them."""
    return Acked(min((0 if note is None else note - 1 for note in notes if note != 0), default=end))


def _ids_us(made: Mapping[str, Any]) -> int:
    return int(made.get("duplicates_us") or 0)


def _least(found: list[Acked]) -> Acked | None:
    if not found:
        return None
    return Acked(min(one.end for one in found), max(one.ids_us for one in found))


def _with_window(disk: Disk, path: str, ask: Callable[[Window], int]) -> int | None:
    """What a window says; None where it cannot be read."""
    try:
        with opened_window(disk, path) as window:
            return ask(window)
    except (HeadwaterError, FileNotFoundError):
        return None
