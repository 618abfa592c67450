"""What of a topic its queues are done with: the place below which no queue group needs an event any more.

Asked by whoever frees the segments of a topic with `retain="until_acked"`. It is read from the windows without their locks: a floor
is one aligned word and only moves over what was acknowledged, so what is read is true, if perhaps a moment old. A window that
was not put in order since a power loss is believed only as far as the log itself was not set back. A group whose window cannot be
read, or that has none yet, needs everything.

The topic of acknowledgements of a group's units of work (see `unit_of_work`) is done with up to the first unit that a window still
has noted as half done, and up to the first acknowledgement that a window would need after a power loss: one that its floor is not past
yet. The floors are on disk before anything below them is given up. The topic's end has to be asked for before the windows: a unit
that is noted later stands behind it.

Thread-safety: may be used by many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from headwater.log.disk.disk import Disk
from headwater.log.port.chunk import Chunk
from headwater.log.port.topic import Topic
from headwater.log.queue.acks_topic import acks_name, decoded
from headwater.log.queue.window import Window, opened_window
from headwater.log.queue.window_store import MemoryWindowStore, local_queues
from headwater.model.errors import HeadwaterError

T = TypeVar("T")

Lost = Callable[[int], int | None]
"""The first offset that unclean stops took back since an incarnation."""


class Acked(msgspec.Struct, frozen=True):
    """No queue group needs an event below `end` that was appended longer than `ids_us` ago: its id may come again till then."""

    end: int
    ids_us: int = 0


def acked_in_folder(
    disk: Disk,
    folder: str,
    topic: Topic,
    number: int,
    *,
    end: int,
    lost_after: Lost,
    chunks: Callable[[], Iterable[Chunk]],
) -> Acked | None:
    """What the queues of a local log are done with in a partition that ends at `end` and holds these `chunks`.

    None where there is no queue.
    """
    found: list[Acked] = []
    for made in local_queues(disk, folder):
        where = f"{folder}/{made['group']}/{made['topic']}"
        if made["topic_id"] == topic.id:
            floor = _with_window(disk, f"{where}/{number}.window", lambda window: _floor(window, topic, lost_after))
            found.append(Acked(floor or 0, _ids_us(made)))
        elif acks_name(made["topic"], made["group"]) == topic.name:
            names = [name for name in disk.names(where) if name.endswith(".window")]
            notes = [_with_window(disk, f"{where}/{name}", lambda window: window.acks_from) for name in names]
            applied = _applied(notes, end).end
            found.append(Acked(_not_needed(disk, where, names, chunks(), applied)))
    return _least(found)


def acked_in_memory(queues: Iterable[MemoryWindowStore], topic: Topic, number: int, *, end: int) -> Acked | None:
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


def _not_needed(disk: Disk, folder: str, names: Iterable[str], chunks: Iterable[Chunk], end: int) -> int:
    """The place below `end` before which no window needs an acknowledgement, even after a power loss at this moment."""
    windows = {
        int(name.removesuffix(".window")): _with_window(disk, f"{folder}/{name}", _floor_and_since) for name in names
    }
    if None in windows.values():
        return 0
    place = 0
    for chunk in chunks:
        for offset, value in zip(chunk.all_offsets().tolist(), chunk.batch.column("value").to_pylist(), strict=True):
            number, _, offsets = decoded(value)
            floor, since = windows.get(number) or (0, 0)
            is_needed = 0 < since <= offset + 1 and len(offsets) and offsets.max() >= floor
            if offset >= end or is_needed:
                break
            place = offset + 1
        else:
            continue
        break
    if place:
        _sync(disk, [f"{folder}/{name}" for name in names])
    return place


def _floor_and_since(window: Window) -> tuple[int, int]:
    return window.floor, window.acks_since


def _sync(disk: Disk, paths: Iterable[str]) -> None:
    """Returns when these windows are on disk, with floors that are no lower than those read before."""
    for path in paths:
        file = disk.open(path)
        try:
            file.sync()
        finally:
            file.close()


def _ids_us(made: Mapping[str, Any]) -> int:
    return int(made.get("duplicates_us") or 0)


def _least(found: list[Acked]) -> Acked | None:
    if not found:
        return None
    return Acked(min(one.end for one in found), max(one.ids_us for one in found))


def _with_window(disk: Disk, path: str, ask: Callable[[Window], T]) -> T | None:
    """What a window says; None where it cannot be read."""
    try:
        with opened_window(disk, path) as window:
            return ask(window)
    except (HeadwaterError, FileNotFoundError):
        return None
