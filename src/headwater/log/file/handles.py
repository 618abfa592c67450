"""Handles: the files of a local log that one process has open, each opened at its first use.

A topic that another process deleted, or deleted and created again, is forgotten as soon as its partitions are asked for;
its files are closed when the last thread that still uses them lets go.

Thread-safety: may be used by many threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from headwater.log.disk.atomic_file import read_file
from headwater.log.disk.disk import Disk, File
from headwater.log.disk.fence import Fence, open_fence
from headwater.log.disk.text import decode_text
from headwater.log.file.partition.head import Head
from headwater.log.file.partition.partition import ALL, Partition
from headwater.log.port.topic import Topic, topic_from_json
from headwater.model.clock import Clock
from headwater.model.errors import Damaged, HeadwaterError, LogNotFound, StorageError, TopicNotFound

GONE = "Somebody removed or renamed its folder; open it where it is now."
"""What to do about a log that is not where it was opened."""

TOPICS_KEPT_MAX = 1024
"""This many files of topics are not parsed again while they are as they were."""

_FILES = ("head", "lock", "sync")


class Handles:
    """The open files of one log in one process."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        *,
        clock: Clock,
        counters: Counter[str],
        writable: bool,
        settle: Callable[[], None],
        rolled: Callable[[], None],
        mend: Callable[[Partition], None],
        closed: Callable[[], Mapping[tuple[str, int], str]],
    ) -> None:
        """`closed` gives the partitions that could not be recovered, each with the reason; `ALL` stands for all of a topic."""
        self.disk = disk
        self.folder = folder
        self._clock = clock
        self._counters = counters
        self._writable = writable
        self._settle = settle
        self._rolled = rolled
        self._mend = mend
        self._look_closed = closed
        self._closed = closed()
        self._mutex = threading.RLock()
        self._topics: dict[str, Topic] = {}
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._whole: dict[str, Sequence[Partition]] = {}
        self._signals: dict[str, File] = {}
        self._fences: dict[bytes, Fence] = {}
        self._used: set[tuple[str, int]] = set()

    def names(self) -> list[str]:
        """The names of all topics, sorted."""
        try:
            return sorted(name for name in self.disk.names(f"{self.folder}/topics") if not name.startswith("."))
        except FileNotFoundError:
            raise LogNotFound(f"The log in {self.folder} is gone.", advice=GONE) from None

    def topic(self, name: str) -> Topic:
        """A topic as this process knows it; never one that was deleted."""
        known, first = self._topics.get(name), self._partitions.get((name, 0))
        if known is not None and first is not None and first.is_as_seen():
            return known
        return self.refresh(name)

    def refresh(self, name: str) -> Topic:
        """A topic from its file."""
        first = self._partitions.get((name, 0))
        changes = -1 if first is None else first.changes()
        try:
            path = f"{self.folder}/topics/{name}/topic"
            topic = _topic_in(read_file(self.disk, path), path)
        except FileNotFoundError:
            self.forget(name)
            if self._lacks_its_file(f"{self.folder}/topics/{name}"):
                raise Damaged(
                    f"{self.folder}/topics/{name}/topic is missing.",
                    advice="Restore this one file from a backup or a mirror; the events beside it are untouched.",
                ) from None
            known = ", ".join(self.names()[:10]) or "none yet"
            raise TopicNotFound(
                f"Topic {name!r} does not exist in {self.folder}.", advice=f"Topics here: {known}."
            ) from None
        with self._mutex:
            if first is not None and not changes & 1:  # what was counted before the file was read is in it
                first.seen = changes
            known_topic = self._topics.get(name)
            if known_topic == topic:
                return known_topic
            if known_topic is not None and known_topic.id == topic.id and known_topic.generation > topic.generation:
                return known_topic  # a thread that was overtaken: partitions are never taken away
            if known_topic is not None and known_topic.id != topic.id:
                self.forget(name)
            self._sync_names(name)
            self._topics[name] = topic
            self._whole.pop(name, None)
            for (of, _), partition in self._partitions.items():
                if of == name:
                    partition.topic = topic
        return topic

    def _lacks_its_file(self, folder: str) -> bool:
        """Whether a topic is there but for its file. One that was made or deleted since that was looked for does not lack it.

        A topic is marked before it is removed, so one that is not marked at the end has been there all the time.
        """
        try:
            head = Head(self.disk, f"{folder}/0/head", writable=False)
        except FileNotFoundError:
            return False
        except Damaged:
            return not self.disk.exists(f"{folder}/topic")
        try:
            return not self.disk.exists(f"{folder}/topic") and not head.is_deleted()
        except Damaged:
            return True
        finally:
            head.close()

    def partition(self, name: str, number: int) -> Partition:
        """A partition, opened at its first use."""
        found = self._partitions.get((name, number))
        if found is not None and not found.is_deleted():
            return found
        with self._mutex:
            if found is not None:
                self.forget(name)
            topic = self.refresh(name)
            if not 0 <= number < topic.partitions:
                raise TopicNotFound(
                    f"Topic {name!r} has no partition {number}.",
                    advice=f"It has partitions 0 to {topic.partitions - 1}.",
                )
            partition = self._open(topic, number)
            latest = self.refresh(name)
            if partition.is_deleted() or latest.id != topic.id:
                raise _deleted(name)
            partition.topic = latest
            self._partitions[name, number] = partition
            return partition

    def partitions(self, name: str) -> Sequence[Partition]:
        """All partitions of a topic, in order."""
        known, topic = self._whole.get(name), self.topic(name)
        # Counted, too: the topic may be split while its partitions are being opened.
        if known is None or len(known) != topic.partitions or known[0].is_deleted():  # the first is always marked first
            known = self._whole[name] = [self.partition(name, number) for number in range(topic.partitions)]
        return known

    def usable_partition(self, name: str, number: int) -> Partition:
        """A partition to be written; one that was poisoned is mended at its first use here. The caller holds no lock."""
        partition = self.partition(name, number)
        if (name, number) not in self._used:
            if partition.is_poisoned():
                self._mend(partition)
            self._used.add((name, number))
        return partition

    def signal(self, name: str) -> None:
        """Wakes the readers of a topic; they would find the events without it, only later."""
        with suppress(StorageError, FileNotFoundError):
            signal = self._signals.get(name)
            if signal is None:
                signal = self._signals[name] = self.disk.open(f"{self.folder}/topics/{name}/signal", "write")
            signal.write_at(0, [b"!"])

    def fence(self, producer: bytes) -> Fence | None:
        """The fence of a named producer that this process has opened."""
        return self._fences.get(producer)

    def open_fence(self, name: str) -> Fence:
        """The fence of a producer's name."""
        fence = open_fence(self.disk, f"{self.folder}/producers", name)
        return self._fences.setdefault(fence.producer, fence)

    def forget(self, name: str) -> None:
        """Drops a topic's files without closing them under another thread's hands."""
        with self._mutex:
            for place in [place for place in self._partitions if place[0] == name]:
                del self._partitions[place]
                self._used.discard(place)
            self._signals.pop(name, None)
            self._whole.pop(name, None)
            self._topics.pop(name, None)

    def close(self) -> None:
        """Closes everything; nobody uses it any more."""
        for partition in self._partitions.values():
            partition.close()
        for signal in self._signals.values():
            signal.close()
        for fence in self._fences.values():
            fence.close()

    def _sync_names(self, name: str) -> None:
        """Whoever made or changed the topic may have died before its name was on disk; nothing is acknowledged till it is."""
        if self._writable:
            try:
                self.disk.sync_folder(f"{self.folder}/topics/{name}")
                self.disk.sync_folder(f"{self.folder}/topics")
            except FileNotFoundError:
                raise _deleted(name) from None

    def _open(self, topic: Topic, number: int) -> Partition:
        why = self._why_closed(topic.name, number)
        if why is not None:
            self._closed = self._look_closed()  # another process may have recovered it since
            why = self._why_closed(topic.name, number)
        if why is not None:
            raise StorageError(
                f"Partition {number} of topic {topic.name!r} could not be recovered after the machine stopped: {why}",
                advice="Nothing acknowledged is lost. Fix the cause, then open the log again or run `headwater doctor --repair`.",
            )
        try:
            return self._open_files(topic, number)
        except FileNotFoundError:
            raise self._missing(topic, number) from None

    def _why_closed(self, name: str, number: int) -> str | None:
        return self._closed.get((name, number), self._closed.get((name, ALL)))

    def _missing(self, topic: Topic, number: int) -> HeadwaterError:
        """Why a partition cannot be opened: a topic is made and removed as a whole, so where the rest of it stands a file was lost."""
        folder = f"{self.folder}/topics/{topic.name}"
        for path in (f"{folder}/{number}", *(f"{folder}/{number}/{file}" for file in _FILES)):
            if not self.disk.exists(path) and self._id(folder) == topic.id:
                return Damaged(
                    f"{path} is missing.",
                    advice="Close every program that uses this log, then run `headwater doctor --repair`.",
                )
        return _deleted(topic.name)

    def _id(self, folder: str) -> str | None:
        """That of the topic in a folder; None where there is none."""
        try:
            return _topic_in(read_file(self.disk, f"{folder}/topic"), f"{folder}/topic").id
        except FileNotFoundError:
            return None

    def _open_files(self, topic: Topic, number: int) -> Partition:
        return Partition(
            self.disk,
            f"{self.folder}/topics/{topic.name}/{number}",
            topic=topic,
            number=number,
            clock=self._clock,
            counters=self._counters,
            settle=self._settle,
            rolled=self._rolled,
            refresh=self.refresh,
            writable=self._writable,
        )


@lru_cache(maxsize=TOPICS_KEPT_MAX)
def _topic_in(raw: bytes, path: str) -> Topic:
    """The topic that its file says. The file is read again and again, and changes rarely."""
    return topic_from_json(decode_text(raw, path, "topic"))


def _deleted(name: str) -> TopicNotFound:
    return TopicNotFound(f"Topic {name!r} was deleted a moment ago.", advice="Create it again, or stop using it.")
