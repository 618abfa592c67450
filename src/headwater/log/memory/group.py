"""A group of a memory log: what its members share, in plain dictionaries.

Members are consumers of one process, so none of them dies alone; one that does not poll is dropped as everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from headwater.log.port.assignment import Place
from headwater.log.port.group import Committed, Owner, Presence, Roster, SharedGroup


class MemoryGroup(SharedGroup):
    """One group in memory; `lock` is the lock of its log, so that transactions exclude everything else."""

    def __init__(self, name: str, lock: threading.Condition) -> None:
        self.name = name
        self._lock = lock
        self.is_deleted = False
        self._roster = Roster()
        self._polls: dict[str, int] = {}
        self._owners: dict[Place, Owner] = {}
        self._committed: dict[Place, Committed] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._lock:
            yield

    def generation(self) -> int:
        return self._roster.generation

    def roster(self) -> Roster:
        return self._roster

    def write_roster(self, roster: Roster) -> None:
        self._roster = roster

    def mark_deleted(self) -> None:
        """It is removed; whoever enters begins it anew."""
        self.is_deleted = True

    def enter(self, member: str, now_us: int) -> Presence:
        self.is_deleted = False
        self._polls[member] = now_us
        return _MemoryPresence(self._polls, member)

    def forget(self, member: str) -> None:
        self._polls.pop(member, None)

    def last_polls(self, members: Iterable[str]) -> dict[str, int]:
        return {member: self._polls[member] for member in members if member in self._polls}

    def places(self) -> list[Place]:
        return sorted(self._owners)

    def owner(self, place: Place) -> Owner:
        return self._owners.get(place, Owner())

    def set_owner(self, place: Place, owner: Owner) -> None:
        self._owners[place] = owner

    def committed(self, place: Place) -> Committed:
        return self._committed.get(place, Committed())

    def set_committed(self, place: Place, committed: Committed) -> None:
        self._committed[place] = committed


class _MemoryPresence:
    def __init__(self, polls: dict[str, int], member: str) -> None:
        self._polls = polls
        self._member = member

    def beat(self, now_us: int) -> None:
        if self._member in self._polls:
            self._polls[self._member] = now_us

    def drop(self) -> None:
        self._polls.pop(self._member, None)
