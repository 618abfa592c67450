"""Groups on Kafka: the brokers know the members, fence them by generation, and keep the offsets.

A group is a Kafka group of the same name behind the prefix of the URL, so other tools show it. Each member has a client of its
own, which takes part in the group's protocol and reads nothing: every partition it is given is paused, and events come through
the same cursors as everywhere (`reader`). The committed offset of a partition carries the topic's id as its metadata, so
that one of a topic that was deleted since is not taken for one of the topic that has its name now.

Invariants:
- partitions change hands only while the client is polled, which `attend` and `beat` do: between them what is `owned` stays owned,
  or the member is dead to the brokers. The assignment is cooperative, so what need not move goes on meanwhile;
- the brokers check member and generation of a commit, and not the partition: whoever commits looks into `owned` first;
- an offset that a transaction is about to change is not read before that is settled: of two members, one that died in the
  middle of a transaction and one that took over, the second begins where the first really ended. Who looks at a group waits for
  what its own log has committed, which brokers settle after they have said yes; for a transaction of others, only a little.

A plain commit is sent by the client with the member's id of that moment. One that lost its membership in the same moment in
which it commits, in a group that has no other member any more, is therefore not refused; its offset is one that it reached, so
events may come again and none is skipped. A transaction names member and generation itself, and is refused.

Thread-safety: a membership belongs to the thread of its consumer; transactions read `owned` of it in that thread too.
"""

from __future__ import annotations

import os
import struct
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from headwater.log.kafka.brokers import LEADER_S
from headwater.log.kafka.catalog import FOREIGN
from headwater.log.kafka.cluster import Cluster, keep_for_ever
from headwater.log.kafka.errors import passing
from headwater.log.kafka.writer import Consumed
from headwater.log.port.assignment import Place
from headwater.log.port.group import (
    NO_OFFSET,
    Committed,
    GroupState,
    MemberProgress,
    OffsetPart,
    Owner,
    Subscribe,
    Subscribed,
    group_in_use,
    not_owner,
)
from headwater.log.port.topic import check_name
from headwater.model.errors import (
    Closed,
    GroupNotFound,
    InvalidName,
    NotOwner,
    TopicNotFound,
    Unreachable,
    Unsupported,
)

SESSION_S = 10.0
"""How long the brokers wait for a sign of life of a member's process before they take it for dead."""

JOIN_S = 10.0
"""How long a new member waits for its first partitions; it goes on without them."""

_LOOK_S = 0.25
_HEARTBEAT_S = 0.5
_TICK_MS = 50
_SERVED_MAX = 1000
_SETTLED_S, _SETTLED_LOOK_S = 0.5, 0.02
_NEW_GENERATION_S = 1.0
_OURS = "headwater"
_METADATA = struct.Struct("<5s2xi")
_METADATA_MAGIC = b"CGMDv"
_NO_GENERATION = -1


class KafkaGroups:
    """The groups of one log on Kafka."""

    def __init__(self, cluster: Cluster, prefix: str, *, check_writable: Callable[[], None]) -> None:
        self.cluster = cluster
        self.prefix = prefix
        self.check_writable = check_writable
        self.joined: weakref.WeakSet[KafkaMembership] = weakref.WeakSet()
        self.committed_at: dict[str, float] = {}
        """When this log last committed offsets of a group by a transaction."""

    def names(self) -> list[str]:
        """The names of all groups, sorted; those of share groups are not among them."""
        kinds = self.cluster.kafka.ConsumerGroupType
        found = self.cluster.ask(
            lambda left: self.cluster.admin.list_consumer_groups(
                types={kinds.CLASSIC, kinds.CONSUMER}, request_timeout=left
            ).result(),
            "list the groups",
        )
        ours = (group.group_id[len(self.prefix) :] for group in found.valid if group.group_id.startswith(self.prefix))
        return sorted(name for name in ours if _is_name(name))

    def group(self, name: str) -> KafkaGroup:
        """One group, whether there is one or not."""
        return KafkaGroup(self, name)

    def consumed(self, parts: Sequence[OffsetPart]) -> list[Consumed]:
        """What a transaction tells the brokers so that it commits these offsets; `NotOwner`."""
        found = []
        for (group, member), mine in groupby(sorted(parts, key=_member), key=_member):
            offsets = {(part.topic, part.partition): part for part in mine}
            membership = next((one for one in self.joined if one.name == group and one.has(offsets)), None)
            metadata = b"" if membership is None else membership.metadata(member)
            if membership is None or not metadata:
                raise not_owner(group, next(iter(offsets)))
            positions = {place: Committed(part.offset, topic_id=part.topic_id) for place, part in offsets.items()}
            found.append(Consumed(_positions(self.cluster, self.prefix, positions), metadata))
        return found

    def commit_with(self, parts: Sequence[OffsetPart], commit: Callable[[Sequence[Consumed]], Any]) -> Any:
        """Commits a transaction with these offsets; once more where the group got a new generation meanwhile."""
        consumed = self.consumed(parts)
        while True:
            try:
                found = commit(consumed)
                self.committed_at |= dict.fromkeys((part.group for part in parts), time.monotonic())
                return found
            except NotOwner:
                consumed = self._newer(parts, consumed)

    def _newer(self, parts: Sequence[OffsetPart], refused: Sequence[Consumed]) -> list[Consumed]:
        """The same offsets in the next generation; `NotOwner` where there is none with this member in it."""
        deadline = time.monotonic() + _NEW_GENERATION_S
        while True:
            consumed = self.consumed(parts)
            if [one.metadata for one in consumed] != [one.metadata for one in refused]:
                return consumed
            if time.monotonic() > deadline:
                raise not_owner(parts[0].group, (parts[0].topic, parts[0].partition))
            time.sleep(0.01)


class KafkaGroup:
    """One group."""

    def __init__(self, groups: KafkaGroups, name: str) -> None:
        self.name = name
        self._groups = groups
        self._cluster = groups.cluster
        self._prefix = groups.prefix

    def join(self, *, subscribe: Subscribe, pattern: str | None, interval_s: float) -> KafkaMembership:
        self._groups.check_writable()
        membership = KafkaMembership(self._cluster, self._prefix, self.name, subscribe, interval_s=interval_s)
        self._groups.joined.add(membership)
        return membership

    def state(self) -> GroupState:
        """What the brokers say; they do not tell the generation, nor when a member polled last."""
        described = self._asked("describe_consumer_groups", [self._prefix + self.name])
        members = [self._member(member) for member in described.members]
        partitions: dict[Place, tuple[str | None, Committed]] = {
            place: (None, committed) for place, committed in self._offsets().items()
        }
        if described.state == self._cluster.kafka.ConsumerGroupState.DEAD or not (members or partitions):
            known = ", ".join(self._groups.names()[:10]) or "none yet"
            raise GroupNotFound(f"Group {self.name!r} does not exist in this log.", advice=f"Groups here: {known}.")
        for member in members:
            for place in member.partitions:
                partitions[place] = (member.member, partitions.get(place, (None, Committed()))[1])
        return GroupState(None, members, dict(sorted(partitions.items())))

    def topics(self) -> set[str]:
        return {topic for topic, _ in self.state().partitions}

    def move(self, offsets: Mapping[Place, Committed]) -> None:
        self._groups.check_writable()
        members = self.state().members
        if members:
            raise group_in_use(self.name, [member.pid for member in members])
        if not offsets:
            return
        wanted = self._cluster.kafka.ConsumerGroupTopicPartitions(
            self._prefix + self.name, _positions(self._cluster, self._prefix, offsets)
        )
        try:
            found = self._asked("alter_consumer_group_offsets", [wanted])
            for place in found.topic_partitions:
                if place.error is not None:
                    raise self._cluster.as_ours(place.error, what=f"move group {self.name!r}")
        except NotOwner:  # somebody joined since
            raise group_in_use(self.name, [member.pid for member in self.state().members]) from None

    def remove(self) -> None:
        self._groups.check_writable()
        members = self.state().members
        if members:
            raise group_in_use(self.name, [member.pid for member in members])
        self._asked("delete_consumer_groups", [self._prefix + self.name])

    def _offsets(self) -> dict[Place, Committed]:
        asked = [self._cluster.kafka.ConsumerGroupTopicPartitions(self._prefix + self.name)]
        deadline = max(time.monotonic() + _SETTLED_S, self._groups.committed_at.get(self.name, -LEADER_S) + LEADER_S)
        while (found := self._settled(asked)) is None and time.monotonic() < deadline:
            time.sleep(_SETTLED_LOOK_S)
        if found is None:
            found = self._asked("list_consumer_group_offsets", asked).topic_partitions
        return _committed(found, self._prefix)

    def _settled(self, asked: list[Any]) -> list[Any] | None:
        """The offsets; None where a transaction is about to change some, or nobody said in a little time."""
        kafka, ask = self._cluster.kafka, self._cluster.admin.list_consumer_group_offsets
        try:
            [future] = ask(asked, require_stable=True, request_timeout=_SETTLED_S).values()
            found: list[Any] = future.result().topic_partitions
        except kafka.KafkaException as caught:
            if caught.args[0].code() in (kafka.KafkaError.UNSTABLE_OFFSET_COMMIT, *passing()):
                return None
            raise self._cluster.as_ours(caught.args[0], what=f"look at group {self.name!r}") from None
        waits = [at for at in found if at.error and at.error.code() == kafka.KafkaError.UNSTABLE_OFFSET_COMMIT]
        return None if waits else found

    def _asked(self, question: str, what: list[Any]) -> Any:
        return _asked(self._cluster, self.name, question, what)

    def _member(self, described: Any) -> MemberProgress:
        assigned = described.assignment.topic_partitions if described.assignment else []
        places = sorted(_place(at, self._prefix) for at in assigned if at.topic.startswith(self._prefix))
        topics = sorted({topic for topic, _ in places})
        return MemberProgress(
            described.member_id, self._cluster.pid_of(described.client_id), None, None, places, topics, None
        )


class KafkaMembership:
    """One consumer's part in a group on Kafka."""

    def __init__(self, cluster: Cluster, prefix: str, group: str, subscribe: Subscribe, *, interval_s: float) -> None:
        self.name = group
        self.owned: dict[Place, Owner] = {}
        self._cluster = cluster
        self._prefix = prefix
        self._subscribe = subscribe
        self._topics: Mapping[str, Subscribed] = {}
        self._given: dict[Place, str | None] = {}
        self._look_at = 0.0
        self._joined = False
        self._pid = os.getpid()
        interval_ms = max(1, round(interval_s * 1000))
        session_ms = min(round(SESSION_S * 1000), interval_ms)
        self._consumer = cluster.member(
            prefix + group,
            {
                "max.poll.interval.ms": interval_ms,
                "session.timeout.ms": session_ms,
                "heartbeat.interval.ms": max(1, min(round(_HEARTBEAT_S * 1000), session_ms // 4)),
                # Nothing is ever stored for it to commit: but without this tick the client looks at its group twice a second.
                "enable.auto.commit": True,
                "enable.auto.offset.store": False,
                "auto.commit.interval.ms": _TICK_MS,
            },
        )
        try:
            self._join()
        except BaseException:
            self.leave()
            raise

    def attend(self, held: Mapping[Place, Owner]) -> dict[Place, Owner] | None:
        if time.monotonic() >= self._look_at:
            self._look()
        self._serve(0)
        if self.owned == held:
            return None
        return {place: owner for place, owner in self.owned.items() if held.get(place) != owner}

    def beat(self) -> None:
        self._serve(0)

    def committed(self, places: Collection[Place]) -> dict[Place, Committed]:
        if not places:
            return {}
        asked = _positions(self._cluster, self._prefix, dict.fromkeys(places, Committed()))
        kafka = self._cluster.kafka

        def look(left: float) -> Any:
            try:
                return self._consumer.committed(asked, timeout=_SETTLED_S)
            except kafka.KafkaException as caught:
                waits = caught.args[0].code() in (kafka.KafkaError._TIMED_OUT, kafka.KafkaError.UNSTABLE_OFFSET_COMMIT)
                if waits and self._cluster.is_alive():
                    return []
                raise

        found = _committed(self._cluster.ask(look, f"find what group {self.name!r} committed"), self._prefix)
        return {place: found[place] for place in places if place in found}

    def commit(self, offsets: Mapping[Place, Committed]) -> None:
        mine = {place: committed for place, committed in offsets.items() if place in self.owned}
        if mine:
            asked = _positions(self._cluster, self._prefix, mine)
            try:
                self._cluster.ask(lambda left: self._commit(asked, self._owners(mine)), "commit offsets")
            except NotOwner:
                raise not_owner(self.name, next(iter(mine))) from None
        for place in offsets.keys() - mine.keys():
            raise not_owner(self.name, place)

    def leave(self) -> None:
        self.owned = {}
        with suppress(RuntimeError):  # closed already
            self._consumer.close()

    def drop(self) -> None:
        """In a child there is nothing to end: the client's threads are the parent's."""
        self.owned = {}
        if os.getpid() != self._pid:
            keep_for_ever(self._consumer)

    def has(self, offsets: Mapping[Place, OffsetPart]) -> bool:
        """Whether these are of this member, since the generations that they name."""
        return all(self.owned.get(place) == Owner(part.member, part.generation) for place, part in offsets.items())

    def metadata(self, member: str) -> bytes:
        """What the brokers check a transaction's offsets by; empty where the member is dead to them."""
        found: bytes = self._consumer.consumer_group_metadata()
        return found if self._consumer.memberid() == member and f"\0{member}\0".encode() in found else b""

    # Joining and following

    def _join(self) -> None:
        """Waits for the partitions where nobody else has them: the others give some away when they poll."""
        self._look()
        if self._has_others():
            return
        deadline = time.monotonic() + JOIN_S
        while self._topics and not self._joined and time.monotonic() < deadline:
            self._serve(0.02)
        if self._topics and not self._joined and not self._cluster.is_alive():
            raise Unreachable(
                f"{self._cluster.address.url} does not answer: could not join group {self.name!r}.",
                advice="Check that the brokers run, then open the consumer again.",
            )

    def _has_others(self) -> bool:
        state = _asked(self._cluster, self.name, "describe_consumer_groups", [self._prefix + self.name])
        mine = self._consumer.memberid()
        return any(member.member_id != mine for member in state.members)

    def _look(self) -> None:
        """Subscribes to what there is now; where a topic was made anew, the member joins again and begins with it anew."""
        topics = {}
        for name, seen in self._subscribe().items():
            with suppress(TopicNotFound):
                self._cluster.know(self._consumer, self._prefix + name, seen.id, seen.partitions)
                topics[name] = seen
        self._look_at = time.monotonic() + _LOOK_S
        is_anew = any(name in topics and topics[name].id != seen.id for name, seen in self._topics.items())
        if topics.keys() == self._topics.keys() and not is_anew:
            return
        if is_anew or not topics:
            self._consumer.unsubscribe()
        if topics:
            self._consumer.subscribe(
                [self._prefix + name for name in sorted(topics)],
                on_assign=self._assigned,
                on_revoke=self._revoked,
                on_lost=self._revoked,
            )
        self._topics = topics

    def _serve(self, wait_s: float) -> None:
        """Has the client do what the group asks of it, and takes over what it was given."""
        kafka = self._cluster.kafka
        for _ in range(_SERVED_MAX):
            try:
                told = self._consumer.poll(wait_s)
            except RuntimeError:
                raise Closed("The consumer was closed.", advice="Open another with log.consumer(…).") from None
            except kafka.KafkaException as caught:
                raise self._cluster.as_ours(caught.args[0], what=f"follow group {self.name!r}") from None
            if told is None:
                break
            error = told.error()
            if error is not None and self._cluster.is_refusal(error):
                raise self._cluster.as_ours(error, what=f"join group {self.name!r}")
        self._take_over()

    def _take_over(self) -> None:
        """Knows as its own what the client was given under the member's id of now.

        A client that was taken for dead while it had yet to give something up joins again under another id and holds on to the
        rest, which may be others' by now: then the member leaves, and joins with nothing. One that was told that its generation is over is
        in none until it has joined again: what it was given just before is not its own.
        """
        member = self._consumer.memberid()
        held = {_place(at, self._prefix) for at in self._consumer.assignment()}
        mine = {place for place in held if member and self._given.get(place) == member}
        self.owned = {place: owner for place, owner in self.owned.items() if place in mine and owner.member == member}
        if fresh := mine - self.owned.keys():
            generation = _generation(self._consumer.consumer_group_metadata())
            if generation != _NO_GENERATION:
                self.owned |= dict.fromkeys(sorted(fresh), Owner(member, generation))
        if member and mine != held and self._topics:
            self.owned, self._topics, self._look_at = {}, {}, 0.0
            self._consumer.unsubscribe()

    def _assigned(self, consumer: Any, partitions: list[Any]) -> None:
        for at in partitions:
            at.offset = 0
        consumer.incremental_assign(partitions)
        consumer.pause(partitions)
        self._given |= dict.fromkeys((_place(at, self._prefix) for at in partitions), consumer.memberid())
        self._joined = True

    def _revoked(self, consumer: Any, partitions: list[Any]) -> None:
        for at in partitions:
            self.owned.pop(_place(at, self._prefix), None)
            self._given.pop(_place(at, self._prefix), None)

    # Committing

    def _commit(self, offsets: list[Any], members: set[str]) -> None:
        """One attempt; a generation that was new to the client only is tried again, as `Cluster.ask` does with what passes."""
        kafka = self._cluster.kafka
        if {self._consumer.memberid()} != members:
            raise kafka.KafkaException(kafka.KafkaError(kafka.KafkaError.UNKNOWN_MEMBER_ID))
        try:
            errors = [at.error for at in self._consumer.commit(offsets=offsets, asynchronous=False) if at.error]
        except kafka.KafkaException as caught:
            errors = [caught.args[0]]
        for error in errors:
            if error.code() == kafka.KafkaError.ILLEGAL_GENERATION:
                error = kafka.KafkaError(kafka.KafkaError.REBALANCE_IN_PROGRESS)
            raise kafka.KafkaException(error)

    def _owners(self, places: Collection[Place]) -> set[str]:
        return {self.owned[place].member for place in places}


def _asked(cluster: Cluster, group: str, question: str, what: list[Any]) -> Any:
    """Asks as administrator about one group."""
    ask = getattr(cluster.admin, question)

    def look(left: float) -> Any:
        [future] = ask(what, request_timeout=left).values()
        return future.result()

    return cluster.ask(look, f"look at group {group!r}")


def _is_name(name: str) -> bool:
    """Whether a group of the cluster can be one of ours."""
    with suppress(InvalidName):
        return bool(check_name(name, of="group"))
    return False


def _place(at: Any, prefix: str) -> Place:
    return at.topic[len(prefix) :], at.partition


def _positions(cluster: Cluster, prefix: str, offsets: Mapping[Place, Committed]) -> list[Any]:
    """Offsets as Kafka's client takes them."""
    make = cluster.kafka.TopicPartition
    return [
        make(prefix + topic, number)
        if committed.offset == NO_OFFSET
        else make(prefix + topic, number, committed.offset, f"{_OURS}:{committed.topic_id}")
        for (topic, number), committed in offsets.items()
    ]


def _committed(positions: Sequence[Any], prefix: str) -> dict[Place, Committed]:
    """What Kafka's client gives as offsets; one that another program committed is of the topic as it is now."""
    return {
        _place(at, prefix): Committed(max(at.offset, NO_OFFSET), topic_id=_topic_id(at.metadata or ""))
        for at in positions
        if at.error is None and at.topic.startswith(prefix)
    }


def _topic_id(metadata: str) -> str:
    """The topic's id; empty where it is another program's, or of a topic of others, which may be adopted since."""
    prefix, _, topic_id = metadata.partition(":")
    return topic_id if prefix == _OURS and not topic_id.startswith(FOREIGN) else ""


def _member(part: OffsetPart) -> tuple[str, str]:
    return part.group, part.member


def _generation(metadata: bytes) -> int:
    """The generation, which the client says in no other way."""
    magic, generation = _METADATA.unpack_from(metadata)
    if magic != _METADATA_MAGIC:
        raise Unsupported(
            f"This version of librdkafka describes the members of groups in an unknown format ({magic!r}).",
            advice="Install the version of confluent-kafka that Headwater's requirements name.",
        )
    return int(generation)
