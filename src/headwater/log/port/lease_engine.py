"""A lease engine: what a store offers for queues. It hands out the events of one queue to one handle, and settles them.

`Queue` is the face that users see: it checks arguments, counts, gathers acknowledgements and makes leases. The engine behind it
decides who has which event. The store makes the engine. There are two: windows over a partitioned log (`WindowEngine`, for
logs in a folder and in memory) and Kafka's share groups (`ShareEngine`). What an engine cannot do is listed in the
store's `QueueFeatures`, and refused by it with what to do instead.

Thread-safety: an engine may be used by many threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.model.clock import Clock, SteadyClock
from headwater.model.errors import Closed, Unsupported
from headwater.model.event import Event

Order = Literal["none", "key", "sticky"]

Feature = Literal[
    "order='key'",
    "order='sticky'",
    "duplicates_s=",
    "where=",
    "deliveries_max=None",
    "nack(delay_s=…)",
    "send(delay_s=…) and send(at=…)",
    "extend",
    "defer",
    "recall",
    "browse",
    "depth",
    "floors",
    "seek",
    "tx.ack",
]
"""What some engine cannot do, as users write it."""


class QueueFeatures(msgspec.Struct, frozen=True):
    """What the queues of a store can do: everything except what is `missing`, each with the reason and what to do instead."""

    store: str = ""
    missing: Mapping[Feature, tuple[str, str]] = {}

    def check(self, *features: Feature) -> None:
        """Refuses what is missing; `Unsupported`."""
        for feature in features:
            if feature in self.missing:
                reason, advice = self.missing[feature]
                raise Unsupported(f"Queues on {self.store} do not support {feature}: {reason}.", advice=advice)


class QueueSettings(msgspec.Struct, frozen=True):
    """What a handle asks of its queue; `headwater.log.queue.settings` checks it and has the defaults."""

    lease_us: int
    deliveries_max: int | None
    has_keys: bool
    is_sticky: bool
    duplicates_us: int | None


class Bury(Protocol):
    """Writes dead letters (see `DeadLetterTopic`)."""

    def __call__(
        self,
        events: Sequence[Event],
        deliveries: Sequence[int],
        reasons: Sequence[str],
        begun: Sequence[bool],
        *,
        acks: Sequence[Write] = (),
    ) -> None: ...


class QueueOpening(msgspec.Struct, frozen=True):
    """One handle that opens a queue: which queue, how, and what the engine needs of the handle."""

    group: str
    topic: Topic
    settings: QueueSettings
    wanted: dict[str, Any]
    """What the queue will be if it is new: group, topic, topic_id, order, dead, duplicates_us."""
    where: Callable[[Event], bool] | None
    """Which events the handle wants; None for all."""
    clock: Clock
    steady: SteadyClock
    counters: Counter[str]
    bury: Bury
    acks_topic: Callable[[], Topic]
    """The topic of the group's acknowledgements in transactions, made where it is missing."""

    def settings_of(self, made: Mapping[str, Any]) -> QueueSettings:
        """The settings, for a queue that was made so: without dead letters there is no limit of deliveries."""
        return (
            self.settings if made["dead"] is not None else msgspec.structs.replace(self.settings, deliveries_max=None)
        )


class Granted(msgspec.Struct, frozen=True):
    """Events of one partition, leased at once: they share a token and a deadline.

    The engine knows by the token that a lease has ended and that somebody else was given its event.
    """

    partition: int
    token: int
    deadline: int
    """By the steady clock."""
    events: Sequence[Event]
    deliveries: Sequence[int]
    gone: Sequence[int] = ()
    """Offsets that were leased and hold no event any more: the handle acknowledges them."""


class Taken(msgspec.Struct, frozen=True):
    """What one look of an engine gave."""

    granted: list[Granted] = []
    again_s: float = 0.0
    """How long to sleep before the next look, where this one gave nothing."""


class SentBack(Protocol):
    """Notes of how far dead letters were sent back, where an engine cannot look into a queue of dead letters."""

    def places(self, topic_id: str) -> dict[int, int]:
        """In each partition of the topic of dead letters the first offset that was not sent back."""

    def note(self, topic_id: str, places: Mapping[int, int]) -> None:
        """Everything before these places was sent back."""


class LeaseEngine(Protocol):
    """Hands out and settles the events of one queue, for one handle."""

    features: QueueFeatures
    made: Mapping[str, Any]
    """What the queue is: group, topic, topic_id, order, dead, duplicates_us."""
    writable: bool
    """Whether anything may be changed."""
    has_threads: bool
    """Whether a thread may write acknowledgements: not on a simulated disk."""
    asks: bool
    """Whether `take` waits for a server, so that asyncio calls it in a thread."""
    sent_back: SentBack | None
    """How dead letters are read: by these places; or, where it is None, as a queue of their own."""

    def patience_s(self) -> float:
        """How long a caller looks at least, whatever its timeout."""

    def ready(self, events_max: int) -> list[Granted]:
        """What the engine holds already; nobody is asked, and no acknowledgement needs to be written before."""

    def take(self, events_max: int, *, wait_s: float) -> Taken:
        """What can be leased now. An engine that `asks` may take up to `wait_s`; 0 says that this is the only look."""

    def pause(self, s: float) -> None:
        """Sleeps that long, or until there may be something to lease."""

    async def pause_async(self, s: float) -> None:
        """`pause` for asyncio."""

    def ack(self, partition: int, offsets: Sequence[int], token: int) -> int:
        """Acknowledges what is still leased by the token; how many were not."""

    def nack(self, partition: int, offsets: Sequence[int], token: int, *, time: int, reason: str) -> list[int]:
        """Gives back, to be delivered from a `time` of the steady clock on (0: now); those that came too late.

        Events that were delivered too often become dead letters with the reason.
        """

    def reject(self, partition: int, offsets: Sequence[int], token: int, *, reason: str) -> list[int]:
        """Makes dead letters; those that came too late."""

    def give_back(self) -> None:
        """Gives back everything that this handle has out, before it is closed."""

    def close(self) -> None:
        """Frees everything."""

    def forked(self) -> None:
        """In a child: lets go of what is the parent's without changing anything."""


def was_closed(topic: str, *, is_foreign: bool = False) -> Closed:
    """A handle is used after its end, or in a child of its process."""
    why = "belongs to the process that forked this one" if is_foreign else "was closed"
    return Closed(f"The queue on topic {topic!r} {why}.", advice="Open another with log.queue(…).")
