"""Kafka's brokers as one process talks to them: an address, the clients that are made for it, and questions that are asked until answered.

What the brokers refuse becomes one of our errors here (`as_ours`), and what they do not answer becomes `Unreachable` after
a few seconds. Clients write nothing to standard error: their own log goes to the logger `headwater.kafka`, which is
silent unless a program gives it a handler.

Thread-safety: everything here may be used by many threads.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from headwater.log.kafka.errors import client_library, kinds, passing
from headwater.model.backoff import Backoff
from headwater.model.errors import (
    Closed,
    HeadwaterError,
    InvalidInput,
    NotOwner,
    PositionLost,
    TopicNotFound,
    Unreachable,
    Unsupported,
)

ANSWER_S = 3.0
"""How long brokers may take to answer before they count as unreachable."""

LEADER_S = 30.0
"""How long a partition may be without a leader while other brokers answer: a broker that died is missed after ten seconds."""

DECODERS = 2
"""Threads that decode what was fetched."""

END, BEGINNING = -1, -2
_T = TypeVar("_T")
_PREFIX = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*)?")
_ASK_AGAIN_S = (0.005, 0.3)
"""The first and the longest pause before brokers that gave no answer are asked again."""
_NEW_TOPIC_S = 2.0
_ALIVE_S = 1.5
_ALIVE_LOOKS = 2
_OURS = {
    "bootstrap.servers", "enable.idempotence", "acks", "transactional.id", "isolation.level", "group.id", "logger",
    "enable.auto.commit", "enable.partition.eof", "linger.ms", "key.deserializer", "value.deserializer", "group.protocol",
    "max.poll.interval.ms", "partition.assignment.strategy", "group.instance.id", "enable.auto.offset.store",
}  # fmt: skip
"""Settings of clients that our promises rest on."""


class Address(msgspec.Struct, frozen=True):
    """What a `kafka://` URL says: brokers, the prefix of our topics' names there, and options of the clients."""

    brokers: str
    prefix: str
    options: tuple[tuple[str, str], ...]

    @property
    def url(self) -> str:
        """The address without its options, which may be secret."""
        return f"kafka://{self.brokers}" + (f"?prefix={self.prefix}" if self.prefix else "")


def read_address(rest: str) -> Address:
    """The address from what stands behind `kafka://`; an option `env:NAME` is read from the environment."""
    brokers, _, query = rest.partition("?")
    brokers = brokers.rstrip("/")
    if not brokers or "/" in brokers or "@" in brokers:
        raise InvalidInput(
            f"The address kafka://{brokers.rpartition('@')[2]} names no brokers.",
            advice="Write kafka://host:9092, or kafka://host1:9092,host2:9092?prefix=app.&security.protocol=SSL.",
        )
    options: list[tuple[str, str]] = []
    prefix = ""
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "prefix":
            if not _PREFIX.fullmatch(value):
                raise InvalidInput(
                    f"{value!r} cannot be the prefix of topics.", advice="Use letters, digits, '.', '_' and '-'."
                )
            prefix = value
            continue
        if name in _OURS:
            raise InvalidInput(f"Headwater sets the option {name} itself.", advice="Leave it out of the URL.")
        if value.startswith("env:"):
            if value[4:] not in os.environ:
                raise InvalidInput(
                    f"Option {name} is to come from {value[4:]}, which is not set.", advice=f"Set {value[4:]}."
                )
            value = os.environ[value[4:]]
        options.append((name, value))
    return Address(brokers, prefix, tuple(sorted(options)))


class Brokers:
    """The clients of one process for the brokers at one address."""

    def __init__(self, address: Address) -> None:
        self.kafka = client_library()
        self.admin_library: Any = importlib.import_module("confluent_kafka.admin")
        self.address = address
        self.name = f"headwater-{uuid.uuid4().hex[:12]}"
        self._settings = {"client.id": "headwater", **dict(address.options), "bootstrap.servers": address.brokers}
        self._known: set[tuple[int, str]] = set()
        # A client that was told "no such topic" believes it for a while, so who asks for offsets never looks for topics.
        self.askers, self._lookers = _Consumers(self), _Consumers(self)
        self._admin: Any = None
        self.list_topics()
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="headwater-kafka-decoder")

    def close(self) -> None:
        """Frees everything."""
        self._decoders.shutdown(wait=False)
        self.askers.close()
        self._lookers.close()
        self._admin = None

    # Clients

    def consumer(self) -> Any:
        """A consumer without a group that reads what is committed."""
        return self._made(
            self.kafka.Consumer,
            {
                "group.id": self.name,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 2,
                "fetch.queue.backoff.ms": 5,
                "fetch.error.backoff.ms": 20,
                "queued.min.messages": 1_000_000,
                "queued.max.messages.kbytes": 16_384,
                "topic.metadata.propagation.max.ms": 0,
            },
        )

    def share_consumer(self, group: str, *, poll_interval_ms_max: int, events_max: int) -> Any:
        """A member of a share group that settles each event itself."""
        kind = getattr(self.kafka, "ShareConsumer", None)
        if kind is None:
            raise Unsupported(
                "Queues on Kafka need confluent-kafka 2.16 or newer.", advice='Run: pip install -U "headwater[kafka]".'
            )
        return self._made(
            kind,
            {
                "group.id": group,
                "share.acknowledgement.mode": "explicit",
                "max.poll.interval.ms": poll_interval_ms_max,
                "max.poll.records": events_max,
                "fetch.wait.max.ms": 100,
            },
        )

    def member(self, group: str, settings: Mapping[str, Any]) -> Any:
        """A consumer that belongs to a group; its id tells the process."""
        ours = {"group.id": group, "partition.assignment.strategy": "cooperative-sticky"}
        return self._made(
            self.kafka.Consumer, {**settings, **ours}, **{"client.id": f"{self._settings['client.id']}.{os.getpid()}"}
        )

    def pid_of(self, client_id: str) -> int | None:
        """The process of a member, if its id is of the kind that ours have."""
        base, _, pid = client_id.rpartition(".")
        return int(pid) if base == self._settings["client.id"] and pid.isdecimal() else None

    def producer(self, **settings: Any) -> Any:
        """A producer whose events are stored once and by all replicas in sync."""
        return self._made(
            self.kafka.Producer,
            {
                "enable.idempotence": True,
                "acks": "all",
                "batch.size": 1_000_000,
                "batch.num.messages": 100_000,
                "message.max.bytes": 95_000_000,
                "queue.buffering.max.messages": 2_000_000,
                "queue.buffering.max.kbytes": 1_000_000,
                "topic.metadata.propagation.max.ms": 5000,
                **settings,
            },
        )

    @property
    def admin(self) -> Any:
        """The client that makes and removes topics."""
        if self._admin is None:
            self._admin = self._made(self.admin_library.AdminClient, {})
        return self._admin

    def _made(self, kind: Callable[..., Any], settings: Mapping[str, Any], **last: Any) -> Any:
        quiet = {"logger": _logger(), "error_cb": _ignore, "topic.metadata.refresh.fast.interval.ms": 10}
        quick = {
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 500,
            "socket.connection.setup.timeout.ms": 5000,
        }
        try:
            return kind({**quick, **settings, **self._settings, **quiet, **last})
        except self.kafka.KafkaException as error:
            text = error.args[0].str() if error.args else str(error)
            raise InvalidInput(
                f"Kafka's client refuses an option of {self.address.url}: {text}.",
                advice="See librdkafka's CONFIGURATION.md for the names and values of options.",
            ) from None

    def decode(self, work: Callable[[], _T]) -> Callable[[], _T]:
        """Does something that leaves other threads alone in a thread of its own; what is returned waits for its result."""
        try:
            return self._decoders.submit(work).result
        except RuntimeError:
            raise _closed() from None

    # Questions

    def list_topics(self, topic: str | None = None) -> Mapping[str, int]:
        """The partitions of each topic there is, or of one."""
        names = {} if topic is None else {"topic": topic}

        def look(left: float) -> Any:
            with self._lookers.one() as looker:
                return looker.list_topics(timeout=left, **names)

        found = self.ask(look, "list the topics")
        unknown = self.kafka.KafkaError.UNKNOWN_TOPIC_OR_PART
        out = {}
        for name, described in found.topics.items():
            if described.error is not None and described.error.code() == unknown:
                continue
            if described.error is not None and topic is not None and described.error.code() not in passing():
                raise self.as_ours(described.error, what=f"describe topic {name!r}")
            out[name] = len(described.partitions)
        return out

    def offsets(self, places: Sequence[tuple[str, int]], which: int) -> list[int]:
        """For each partition the offset at `END`, at `BEGINNING`, or the first at or after a time in ms; -1 where none is."""
        if not places:
            return []
        make = self.kafka.TopicPartition
        asked = [make(topic, partition, which) for topic, partition in places]

        code, begun = self.kafka.KafkaError, time.monotonic()

        def look(left: float) -> list[int]:
            try:
                with self.askers.one() as asker:
                    found = asker.offsets_for_times(asked, timeout=left)
                    for place in found:
                        if place.error is not None:
                            raise self.kafka.KafkaException(place.error)
            except self.kafka.KafkaException as caught:
                unknown = caught.args[0].code() in (
                    code.UNKNOWN_TOPIC_OR_PART, code.UNKNOWN_TOPIC_ID, code._UNKNOWN_PARTITION, code._UNKNOWN_TOPIC
                )  # fmt: skip
                if unknown and time.monotonic() - begun < _NEW_TOPIC_S and self._are_there(places):
                    raise self.kafka.KafkaException(code(code.LEADER_NOT_AVAILABLE)) from None
                raise
            return [place.offset for place in found]

        return self.ask(look, f"find the offsets of {places[0][0]!r}")

    def ask(self, question: Callable[[float], Any], what: str) -> Any:
        """Asks until there is an answer, an error that stays, or nobody answers; a new leader is waited for longer."""
        begun, backoff = time.monotonic(), Backoff(*_ASK_AGAIN_S)
        while True:
            left = begun + ANSWER_S - time.monotonic()
            try:
                return question(max(left, 1.0))
            except self.kafka.KafkaException as caught:
                error = caught.args[0]
                is_late = left <= 0 and (left < ANSWER_S - LEADER_S or not self.is_alive())
                if error.code() not in passing() or is_late:
                    raise self.as_ours(error, what=what) from None
            except RuntimeError:
                raise _closed() from None
            backoff.sleep()

    def is_alive(self) -> bool:
        """Whether any broker answers; asked again before it says no, since a process that was stopped finds its first question late."""
        for _ in range(_ALIVE_LOOKS):
            try:
                with self._lookers.one() as looker:
                    looker.list_topics(timeout=_ALIVE_S)
                return True
            except self.kafka.KafkaException:
                continue
        return False

    def _are_there(self, places: Sequence[tuple[str, int]]) -> bool:
        """Whether the brokers have these partitions."""
        for topic in {topic for topic, _ in places}:
            count = self.list_topics(topic).get(topic, 0)
            if any(partition >= count for name, partition in places if name == topic):
                return False
        return True

    def know(self, client: Any, topic: str, topic_id: str, partitions: int) -> None:
        """Has a client look at a topic before it first uses it, so that it knows this topic and none before it of that name."""
        if (id(client), topic_id) in self._known:
            return

        deadline = time.monotonic() + _NEW_TOPIC_S
        while not self.list_topics(topic) and time.monotonic() < deadline:
            time.sleep(0.002)  # made a moment ago, and not every broker has heard of it

        def look(left: float) -> None:
            found = client.list_topics(topic, timeout=left).topics[topic]
            if found.error is not None:
                raise self.kafka.KafkaException(found.error)
            leaders = [part.leader for part in found.partitions.values()]
            if len(leaders) < partitions or min(leaders) < 0:
                raise self.kafka.KafkaException(self.kafka.KafkaError(self.kafka.KafkaError.LEADER_NOT_AVAILABLE))

        self.ask(look, f"find the leaders of {topic!r}")
        self._known.add((id(client), topic_id))

    def forget(self, client: Any) -> None:
        """The client is gone; another may get its place in memory."""
        self._known = {known for known in self._known if known[0] != id(client)}

    def passes(self, error: Any) -> bool:
        """Whether an error of Kafka's client passes by itself."""
        return error.code() in passing()

    def is_refusal(self, error: Any) -> bool:
        """Whether it does not pass, and is not about a topic that was deleted a moment ago."""
        kind, _ = kinds().get(error.code(), (None, ""))
        return error.fatal() or (kind is not None and kind not in (TopicNotFound, NotOwner, PositionLost))

    def as_ours(self, error: Any, *, what: str) -> HeadwaterError:
        """An error of Kafka's client as one of ours."""
        kind, advice = kinds().get(error.code(), (Unreachable, ""))
        where = self.address.url
        if kind is Unreachable:
            return Unreachable(
                f"{where} does not answer: could not {what} ({error.str() or error.name()}).",
                advice="Check that the brokers run and that the address and security.protocol are right, then try again.",
            )
        return kind(f"{where} refused to {what}: {error.str() or error.name()}.", advice=advice)


class _Consumers:
    """Consumers for questions, each used by one thread at a time: a client that two threads ask at once may lose an answer."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[Any]:
        """A consumer for the time of a question."""
        with self._lock:
            if self._closed:
                raise _closed()
            consumer = self._idle.pop() if self._idle else None
        consumer = consumer or self._brokers.consumer()
        is_kept = True
        try:
            yield consumer
        except self._brokers.kafka.KafkaException:
            is_kept = False  # it may go on believing in a leader that died, or in a topic that was deleted
            raise
        finally:
            with self._lock:
                is_kept = is_kept and not self._closed
                if is_kept:
                    self._idle.append(consumer)
            if not is_kept:
                self._brokers.forget(consumer)
                consumer.close()

    def close(self) -> None:
        """Those in use close when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for consumer in idle:
            consumer.close()


@cache
def _logger() -> logging.Logger:
    logger = logging.getLogger("headwater.kafka")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


def _ignore(error: object) -> None:
    """Every call says itself what went wrong."""


def _closed() -> Closed:
    return Closed("The Kafka log was closed.", advice="Open another with open_log.")
