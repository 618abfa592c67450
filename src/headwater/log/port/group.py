"""A group: consumers that share the partitions of topics and one set of committed offsets.

A consumer joins one (`Membership`). On Kafka the brokers do the work (`group`); elsewhere the members do, as follows.

What the members share (`SharedGroup`: in files for a local log, in memory for a memory log) is changed under the group's lock
only, and is this:

- the roster: the generation, the members with their subscriptions, and the member to which each partition is assigned;
- for each partition who owns it (a member, since a generation) and the offset that was committed last.

A member joins, and looks at its group again at every poll and while it waits. Whoever looks and finds that a member is dead
(the kernel has freed its lock), has not polled for longer than it promised, or that the topics changed, writes the next
roster. Each member then lets go of what is no longer assigned to it, and takes what is assigned to it and has no owner.

Invariants:
- the generation rises with every new roster, and a roster is never changed: so each partition has one assignee in each
  generation, and only it can become the owner in that generation. No two members own a partition in the same generation;
- an owner loses a partition only by letting go of it, or by leaving the roster. A member that is alive and polls is
  never robbed, so what it has in hand is committed before another reads it;
- an offset is committed only by the owner, in the generation in which it became the owner, checked under the lock. A member
  that was taken for dead and comes back is therefore refused (`NotOwner`), and joins again at its next poll;
- a new owner goes on from the committed offset, so no event is skipped. The first owner of all commits where it begins.

Lock order: a group's lock comes after the partitions' locks and before `commit.lock`. Whoever takes it settles dead
transactions first, because one of them may hold offsets of this group.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from headwater.log.port.assignment import Place, assign
from headwater.model.errors import GroupInUse, NotOwner

LOOK_S = 0.05
"""How long a member goes without looking at who else is there."""

NO_OFFSET = -1
NOBODY = ""


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The offset a group goes on from in one partition; `sequence` counts commits, `transaction` is the last that made one."""

    offset: int = NO_OFFSET
    incarnation: int = 0
    transaction: int = 0
    sequence: int = 0
    at_us: int = 0
    topic_id: str = ""

    def holds_for(self, topic_id: str) -> bool:
        """Whether there is one, and it is of this topic, not of one that had its name before; not every log knows which."""
        return self.offset != NO_OFFSET and self.topic_id in ("", topic_id)


class Owner(msgspec.Struct, frozen=True, gc=False):
    """Who reads a partition, and since which generation; nobody where the member is empty."""

    member: str = NOBODY
    generation: int = 0


class OffsetPart(msgspec.Struct, frozen=True, array_like=True):
    """An offset that a member of a group commits, and in what right: as the owner since a generation."""

    group: str
    topic: str
    topic_id: str
    partition: int
    offset: int
    incarnation: int
    member: str
    generation: int


class Subscribed(msgspec.Struct, frozen=True, array_like=True):
    """A topic as a member sees it."""

    id: str
    partitions: int


class MemberProgress(msgspec.Struct, frozen=True):
    """One member of a group, as it is shown; None where its log does not say so."""

    member: str
    pid: int | None
    joined_us: int | None
    polled_s: float | None
    """How long ago it polled."""
    partitions: list[Place]
    topics: list[str]
    pattern: str | None

    @property
    def idle(self) -> bool:
        """Whether it has no partition: there are more members than partitions."""
        return not self.partitions


class GroupState(msgspec.Struct, frozen=True):
    """A group as it is: who is there, and for each partition that it has read the member (if any) and the committed offset."""

    generation: int | None
    members: list[MemberProgress]
    partitions: Mapping[Place, tuple[str | None, Committed]]


class Membership(Protocol):
    """One consumer's part in its group; `owned` are the partitions that are its own."""

    owned: dict[Place, Owner]

    def attend(self, held: Mapping[Place, Owner]) -> dict[Place, Owner] | None:
        """Follows the changes of the group, if there are any: the partitions to begin with, some of which may be held.

        `held` are those that the consumer has begun with; any other that is its own is to be begun with, again if need be.
        """

    def beat(self) -> None:
        """Tells the others that this member works on what it polled; on some logs partitions may be lost here."""

    def committed(self, places: Collection[Place]) -> dict[Place, Committed]:
        """The committed offsets; without those that a transaction is about to change, where the log cannot wait for it."""

    def commit(self, offsets: Mapping[Place, Committed]) -> None:
        """Commits an offset for each place, those that are still this member's own; `NotOwner` if any is not."""

    def leave(self) -> None:
        """Lets go of everything, for others to take it."""

    def drop(self) -> None:
        """Ends the sign of life: the others find out by themselves."""


Subscribe = Callable[[], Mapping[str, "Subscribed"]]
"""The topics that a member reads, as they are now."""


class Group(Protocol):
    """One group of a log."""

    name: str

    def join(self, *, subscribe: Subscribe, pattern: str | None, interval_s: float) -> Membership:
        """A new member, which promises to poll every `interval_s`."""

    def state(self) -> GroupState:
        """The group as it is now."""

    def topics(self) -> set[str]:
        """The topics that it has read, as far as offsets say so, which need not be whole."""

    def move(self, offsets: Mapping[Place, Committed]) -> None:
        """Sets committed offsets; `GroupInUse` while it has members that live."""

    def remove(self) -> None:
        """Forgets it with all its offsets; `GroupInUse` while it has members that live."""


class Member(msgspec.Struct, frozen=True):
    """One consumer of a group, in a roster."""

    pid: int
    joined_us: int
    poll_interval_us: int
    topics: Mapping[str, Subscribed]
    pattern: str | None = None


class Roster(msgspec.Struct, frozen=True):
    """The members of a group, and what is assigned to each, in one generation."""

    generation: int = 0
    members: Mapping[str, Member] = {}
    assigned: Mapping[str, list[str]] = {}
    """For each topic the member of each partition."""

    def places(self) -> dict[Place, str]:
        """The member of each partition."""
        return {(topic, n): member for topic, members in self.assigned.items() for n, member in enumerate(members)}

    def places_of(self, member: str) -> set[Place]:
        """The partitions of one member."""
        return {place for place, assignee in self.places().items() if assignee == member}


class Presence(Protocol):
    """A member's sign of life: everybody sees when its process is dead, and when it polled last."""

    def beat(self, now_us: int) -> None:
        """The member polls."""

    def drop(self) -> None:
        """Lets others take the member for dead, without telling anybody."""


class SharedGroup(Protocol):
    """What the members of one group share; a `Group` by that."""

    name: str

    def join(self, *, subscribe: Subscribe, pattern: str | None, interval_s: float) -> Membership:
        return SharedMembership(self, subscribe=subscribe, pattern=pattern, interval_s=interval_s)

    def state(self) -> GroupState:
        """Read without the lock, so it disturbs nobody: each number was true a moment ago."""
        now_us = boot_us()
        with self.reading():
            roster = self.roster()
            polls = self.last_polls(roster.members)
            alive = living(self, roster, now_us)
            facts = {place: (self.owner(place).member, self.committed(place)) for place in self.places()}
        owned: dict[str, list[Place]] = {name: [] for name in alive}
        for place, (member, _) in facts.items():
            if member in owned:
                owned[member].append(place)
        members = [
            MemberProgress(
                name,
                member.pid,
                member.joined_us,
                max(0.0, (now_us - polls.get(name, now_us)) / 1e6),
                owned[name],
                sorted(member.topics),
                member.pattern,
            )
            for name, member in sorted(alive.items())
        ]
        partitions = {
            place: (member if member in alive else None, committed) for place, (member, committed) in facts.items()
        }
        return GroupState(roster.generation, members, partitions)

    def topics(self) -> set[str]:
        with self.reading():
            return {topic for topic, _ in self.places()}

    def move(self, offsets: Mapping[Place, Committed]) -> None:
        with self.locked():
            check_unused(self)
            self.mend(offsets)
            self.write_roster(next_roster(self.roster(), {}))
            for place in self.places():
                self.set_owner(place, Owner())
            for place, to in offsets.items():
                last = self.committed(place)
                to = msgspec.structs.replace(to, transaction=last.transaction, sequence=last.sequence + 1)
                self.set_committed(place, to)

    def remove(self) -> None:
        with self.locked():
            check_unused(self)
            self.mend(self.places())
            self.mark_deleted()
            self.write_roster(next_roster(self.roster(), {}))
            forget_offsets(self)

    def mend(self, places: Iterable[Place]) -> None:
        """Forgets the offsets of those partitions whose offset cannot be read; the caller holds the lock."""
        return

    def mark_deleted(self) -> None:
        """It is removed, until somebody enters; the caller holds the lock."""

    def reading(self) -> AbstractContextManager[None]:
        """Keeps the group open while it is read without its lock; not together with `locked`."""

    def locked(self) -> AbstractContextManager[None]:
        """Holds the group's lock, with every dead transaction settled."""

    def generation(self) -> int:
        """The generation of the roster, without a lock."""

    def roster(self) -> Roster:
        """The roster."""

    def write_roster(self, roster: Roster) -> None:
        """The next roster; the caller holds the lock."""

    def enter(self, member: str, now_us: int) -> Presence:
        """A new member's sign of life; the caller holds the lock."""

    def forget(self, member: str) -> None:
        """Removes what is left of a member; the caller holds the lock."""

    def last_polls(self, members: Iterable[str]) -> dict[str, int]:
        """When each member that lives polled last."""

    def places(self) -> list[Place]:
        """Every partition that had an owner once."""

    def owner(self, place: Place) -> Owner:
        """Who owns a partition, without a lock."""

    def set_owner(self, place: Place, owner: Owner) -> None:
        """Changes a partition's owner; the caller holds the lock."""

    def committed(self, place: Place) -> Committed:
        """The committed offset of a partition, without a lock."""

    def set_committed(self, place: Place, committed: Committed) -> None:
        """Commits an offset; the caller holds the lock, and has checked the owner."""


class SharedMembership:
    """One consumer's part in a group whose members share everything."""

    def __init__(
        self,
        group: SharedGroup,
        *,
        subscribe: Subscribe,
        pattern: str | None,
        interval_s: float,
    ) -> None:
        self._group = group
        self._subscribe = subscribe
        self._pattern = pattern
        self._interval_us = round(interval_s * 1e6)
        self.member = NOBODY
        self.generation = -1
        self.owned: dict[Place, Owner] = {}
        self._presence: Presence | None = None
        self._awaited: set[Place] = set()
        self._others: set[str] = set()
        self._topics: Mapping[str, Subscribed] = {}
        self._joined_us = 0
        self._look_at_us = 0

    def attend(self, held: Mapping[Place, Owner]) -> dict[Place, Owner] | None:
        """Tells the others that this member polls, and looks at what has changed if it is time to, or if anything has."""
        if self.owned != held:
            self.owned = {place: owner for place, owner in self.owned.items() if held.get(place) == owner}
            self.generation = -1
        now_us = boot_us()
        with self._group.reading():
            if self._presence is not None:
                self._presence.beat(now_us)
                if now_us < self._look_at_us and self._group.generation() == self.generation and not self._can_take():
                    return None
        topics = self._subscribe()
        self._look_at_us = now_us + round(LOOK_S * 1e6)
        with self._group.locked():
            return self._look(topics, now_us)

    def beat(self) -> None:
        """Tells the others that this member works on what it polled."""
        with self._group.reading():
            if self._presence is not None:
                self._presence.beat(boot_us())

    def committed(self, places: Collection[Place]) -> dict[Place, Committed]:
        if not places:
            return {}
        with self._group.locked():
            return {place: self._group.committed(place) for place in places}

    def commit(self, offsets: Mapping[Place, Committed]) -> None:
        if not offsets:
            return
        with self._group.locked():
            lost = commit_offsets(self._group, offsets, self.owned)
        if lost:
            raise not_owner(self._group.name, lost[0])

    def leave(self) -> None:
        if self._presence is None:
            return
        try:
            with self._group.locked():
                roster = self._group.roster()
                for place, owner in self.owned.items():
                    if self._group.owner(place) == owner:
                        self._group.set_owner(place, Owner())
                if self.member in roster.members:
                    others = {name: member for name, member in roster.members.items() if name != self.member}
                    self._group.write_roster(next_roster(roster, others))
                self._group.forget(self.member)
        finally:
            self.drop()

    def drop(self) -> None:
        """Ends the sign of life: the others find out by themselves."""
        if self._presence is not None:
            self._presence.drop()
        self._presence = None
        self.owned = {}

    def _look(self, topics: Mapping[str, Subscribed], now_us: int) -> dict[Place, Owner]:
        roster = self._group.roster()
        if self.member not in roster.members:
            self._enter(now_us)
        members = dict(living(self._group, roster, now_us))
        me = Member(os.getpid(), self._joined_us, self._interval_us, dict(topics), self._pattern)
        if members.get(self.member) != me or members.keys() != roster.members.keys():
            members[self.member] = me
            for gone in roster.members.keys() - members.keys():
                self._group.forget(gone)
            roster = next_roster(roster, members)
            self._group.write_roster(roster)
        self.generation = roster.generation
        self._others = set(roster.members) - {self.member}
        self._let_go_of_made_anew(topics)
        return self._follow(roster)

    def _let_go_of_made_anew(self, topics: Mapping[str, Subscribed]) -> None:
        """Lets go of partitions whose topic was deleted and created again, to take them anew."""
        anew = {name for name, seen in self._topics.items() if name in topics and topics[name].id != seen.id}
        self._topics = topics
        self.owned = {place: owner for place, owner in self.owned.items() if place[0] not in anew}

    def _enter(self, now_us: int) -> None:
        """Joins under a new name: the old one, if there was one, has been taken for dead."""
        self.drop()
        self.member = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._joined_us = time.time_ns() // 1000
        self._presence = self._group.enter(self.member, now_us)

    def _follow(self, roster: Roster) -> dict[Place, Owner]:
        """Lets go of what is assigned to others, and takes what is assigned to this member and free."""
        mine = roster.places_of(self.member)
        for place in [place for place, owner in self.owned.items() if place not in mine]:
            if self._group.owner(place) == self.owned.pop(place):
                self._group.set_owner(place, Owner())
        taken = {}
        for place in sorted(mine - self.owned.keys()):
            if self._group.owner(place).member not in self._others:
                taken[place] = self.owned[place] = Owner(self.member, roster.generation)
                self._group.set_owner(place, self.owned[place])
        self._awaited = mine - self.owned.keys()
        return taken

    def _can_take(self) -> bool:
        return any(self._group.owner(place).member not in self._others for place in self._awaited)


def boot_us() -> int:
    """Microseconds of a clock that all processes of a machine share, and that nobody sets."""
    return time.monotonic_ns() // 1000


def living(group: SharedGroup, roster: Roster, now_us: int) -> dict[str, Member]:
    """The members whose process lives and that polled when they promised to."""
    polls = group.last_polls(roster.members)
    return {
        name: member
        for name, member in roster.members.items()
        if name in polls and now_us - polls[name] <= member.poll_interval_us
    }


def next_roster(roster: Roster, members: Mapping[str, Member]) -> Roster:
    """The roster after a change of members or of their topics."""
    subscriptions = {
        name: {topic: seen.partitions for topic, seen in member.topics.items()} for name, member in members.items()
    }
    places = assign(subscriptions, roster.places())
    assigned: dict[str, list[str]] = {}
    for topic, number in sorted(places):
        assigned.setdefault(topic, []).append(places[topic, number])
    return Roster(roster.generation + 1, members, assigned)


def commit_offsets(
    group: SharedGroup, offsets: Mapping[Place, Committed], owners: Mapping[Place, Owner], *, transaction: int = 0
) -> list[Place]:
    """Commits for those places whose owner is as said, and gives the others; the caller holds the group's lock."""
    lost = []
    for place, wanted in offsets.items():
        if place not in owners or group.owner(place) != owners[place]:
            lost.append(place)
            continue
        before = group.committed(place)
        group.set_committed(
            place,
            msgspec.structs.replace(
                wanted, sequence=before.sequence + 1, transaction=max(transaction, before.transaction)
            ),
        )
    return lost


def check_unused(shared: SharedGroup) -> None:
    """Refuses where some member lives; the caller holds the group's lock."""
    alive = living(shared, shared.roster(), boot_us())
    if alive:
        raise group_in_use(shared.name, [member.pid for member in alive.values()])


def forget_offsets(shared: SharedGroup) -> None:
    """No partition has an owner or a committed offset any more; the caller holds the group's lock.

    The last transaction stays known, so that none of before is applied again.
    """
    for place in shared.places():
        before = shared.committed(place)
        shared.set_owner(place, Owner())
        shared.set_committed(place, Committed(transaction=before.transaction, sequence=before.sequence + 1))


def group_in_use(group: str, pids: Iterable[int | None]) -> GroupInUse:
    """The refusal of a reset."""
    known = list(pids)
    return GroupInUse(
        f"Group {group!r} has {len(known)} members that live (processes {sorted({pid for pid in known if pid})}).",
        advice="Close its consumers first. Their commits would overwrite the new offsets.",
    )


def not_owner(group: str, place: Place) -> NotOwner:
    """The refusal of a commit."""
    return NotOwner(
        f"Partition {place[1]} of topic {place[0]!r} no longer belongs to this member of group {group!r}.",
        advice="It did not poll for too long, or the group gave its partitions to other members. Poll again: the present owner "
        "reads again what was not committed.",
    )
