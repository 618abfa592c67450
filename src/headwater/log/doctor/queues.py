"""What the doctor looks at in queues: what each queue is, and whether its windows can be.

Each word of a window is written by one store of a processor and counts at once, so each has a check of its own (see
`window`). Besides, a window may contradict its queue, its topic or the log: sizes, places, states and times that cannot be. One
that does, or has a wrong bit, is removed, and its partition is delivered from the first event there is: nothing is lost by that, some of it
is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from headwater.log.disk.disk import Disk
from headwater.log.disk.text import read_text, write_text
from headwater.log.file.partition.head import Head
from headwater.log.file.recovery import last_boot_id, read_incarnations
from headwater.log.port.topic import Topic, topic_from_json
from headwater.log.queue.window import DELAYED, DELETE_IT, READY, opened_window
from headwater.model.errors import Damaged, HeadwaterError

Check = tuple[str, Callable[[], object], Callable[[], object] | None]

_FIELDS = {"group", "topic", "topic_id", "order", "dead"}


def queue_checks(disk: Disk, folder: str) -> Iterator[Check]:
    """Every file of every queue, how to look at it, and how to mend it when no consumer lives."""
    queues = f"{folder}/queues"
    for group in _names(disk, queues):
        for topic in _names(disk, f"{queues}/{group}"):
            where = f"{queues}/{group}/{topic}"
            names = _names(disk, where)
            if "queue" not in names:
                continue  # it was removed, or is being made
            described = _topic(disk, f"{folder}/topics/{topic}")
            mend = partial(_restore_queue, disk, where, group, topic, described)
            yield f"{where}/queue", partial(_read_queue, disk, where, group, topic), mend
            made: dict[str, Any] | None = None
            with suppress(HeadwaterError):
                made = _read_queue(disk, where, group, topic)
            for name in names:
                if name.endswith(".window"):
                    path = f"{where}/{name}"
                    look = partial(_check_window, disk, folder, path, made, described, name.removesuffix(".window"))
                    yield path, look, partial(disk.remove, path)


def _names(disk: Disk, folder: str) -> list[str]:
    try:
        return sorted(disk.names(folder))
    except FileNotFoundError:
        return []


def _read_queue(disk: Disk, where: str, group: str, topic: str) -> dict[str, Any]:
    made: dict[str, Any] = read_text(disk, f"{where}/queue", "queue")
    if not made.keys() >= _FIELDS or (made["group"], made["topic"]) != (group, topic):
        raise Damaged(f"{where}/queue describes another queue.", advice="Restore this one file from a backup.")
    return made


def _restore_queue(disk: Disk, where: str, group: str, topic: str, described: Topic | None) -> str:
    """What its windows and its place tell; the rest is said again by whoever opens it next (see `FolderWindowStore.settings`)."""
    if described is None:
        disk.remove(f"{where}/queue")
        return f"The queue of group {group!r} was over a topic that is gone; it is removed."
    has_keys = False
    for name in _names(disk, where):
        with suppress(HeadwaterError):
            if name.endswith(".window"):
                with opened_window(disk, f"{where}/{name}") as window:
                    has_keys |= window.has_keys
    made = {
        "group": group,
        "topic": topic,
        "topic_id": described.id,
        "order": "key" if has_keys else "none",
        "dead": f"{topic}.dead",
        "duplicates_us": None,
        "restored": True,
    }
    write_text(disk, f"{where}/queue", "queue", made)
    return "What was acknowledged stays so. Its order and its dead letters are those of the program that opens it next."


def _topic(disk: Disk, folder: str) -> Topic | None:
    try:
        return topic_from_json(read_text(disk, f"{folder}/topic", "topic"))
    except (HeadwaterError, FileNotFoundError):
        return None


def _check_window(
    disk: Disk, folder: str, path: str, made: dict[str, Any] | None, topic: Topic | None, number: str
) -> None:
    with opened_window(disk, path) as window:
        if made is not None and window.has_keys != (made["order"] != "none"):
            raise _cannot_be(path, "its order is not that of its queue")
        if topic is None or made is None or made["topic_id"] != topic.id:
            return  # of a topic that is gone, or was made anew: nobody reads it
        if window.topic_id != topic.id:
            raise _cannot_be(path, "it speaks of another topic")
        incarnation = _incarnation(disk, folder)
        if incarnation is not None and window.incarnation > incarnation:
            raise _cannot_be(path, f"it speaks of the log's incarnation {window.incarnation}")
        if window.incarnation != incarnation:
            return  # after a power loss its floor is believed and nothing else
        window.check()
        end = _end(disk, f"{folder}/topics/{topic.name}/{number}")
        if end is not None and window.next > end:
            raise _cannot_be(path, f"it knows of event {window.next - 1}, and the partition ends before {end}")
        offsets, states, _, times = window.entries()
        if len(states) and int(states.max()) > DELAYED:
            raise _cannot_be(path, f"event {offsets[int(states.argmax())]} has a state that there is not")
        for hint, mine in ((window.hint_at, times[states == READY]), (window.hint, times[states != READY])):
            if len(mine) and hint > int(mine.min()):
                raise _cannot_be(path, f"it says that nothing is due before {hint}")


def _incarnation(disk: Disk, folder: str) -> int | None:
    """The log's, if it can be read and the log was put in order since the machine was started."""
    with suppress(HeadwaterError):
        if last_boot_id(disk, folder) == disk.boot_id():
            return max((int(entry["incarnation"]) for entry in read_incarnations(disk, folder)), default=0)
    return None


def _end(disk: Disk, folder: str) -> int | None:
    """Where a partition ends, as far as anybody has been told."""
    try:
        head = Head(disk, f"{folder}/head", writable=False)
    except (HeadwaterError, FileNotFoundError):
        return None
    try:
        return head.written().end
    except HeadwaterError:
        return None
    finally:
        head.close()


def _cannot_be(path: str, why: str) -> Damaged:
    return Damaged(f"{path} is damaged: {why}.", advice=DELETE_IT)
