"""What queues on Kafka do not do, because share groups or their client for Python do not, and what to do instead."""

from __future__ import annotations

from typing import NoReturn

from headwater.model.errors import Unsupported

_CANNOT = {
    "order='key'": ("orders events by key", "Read with a consumer group: log.consumer(…) keeps the order of each key."),
    "order='sticky'": ("keeps a key with one consumer", "Read with a consumer group: log.consumer(…)."),
    "duplicates_s=": ("remembers ids", "Use a named producer (id=), which stores a retried event once."),
    "where=": ("selects events", "Use a topic for each kind of event."),
    "deliveries_max=None": (
        "delivers for ever",
        "Give a limit, below the brokers' group.share.max.delivery.count.limit.",
    ),
    "nack(delay_s=…)": ("delays what is given back", "Give it back without a delay, or append it again later."),
    "send(delay_s=…) and send(at=…)": ("delivers at a time", "Append the event when it is due."),
    "extend": ("extends a lease with this client", "Use a longer lease_s= (up to 60 s unless the brokers allow more)."),
    "defer": ("lays events aside", "Append the event to a topic of its own and acknowledge it."),
    "recall": ("lays events aside", "Append the event to a topic of its own and acknowledge it."),
    "browse": ("shows what waits", "Read the topic; `kafka-share-groups.sh --describe` shows the group's place."),
    "depth": ("counts what waits for this client", "Ask `kafka-share-groups.sh --describe --offsets` of Kafka."),
    "floors": ("tells this client its place", "Ask `kafka-share-groups.sh --describe --offsets` of Kafka."),
    "seek": ("moves for this client", "Use `kafka-share-groups.sh --reset-offsets` of Kafka, or another group."),
    "tx.ack": ("takes part in transactions", "Acknowledge after the transaction; make what it appends idempotent."),
}


def refuse(what: str) -> NoReturn:
    """Raises `Unsupported` with what can be done instead."""
    does, advice = _CANNOT[what]
    raise Unsupported(f"{what} is not for queues on Kafka: no share group {does}.", advice=advice)
