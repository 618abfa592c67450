"""What a log on Kafka does not do, and what to do instead. The topic's retention and compaction are Kafka's own settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.model.errors import Unsupported


class KafkaRefusals:
    """The part of a store that has no counterpart in `kafka`."""

    def seal(self, name: str) -> int:
        _refuse("The brokers keep the files of a Kafka topic.", "Nothing needs to be sealed; see docs/kafka.md.")

    def tidy(self, name: str) -> int:
        _refuse(
            "The brokers remove what retention and compaction no longer keep, when they see fit.",
            "Set retention= and compact= on the topic.",
        )

    def split(self, name: str, partitions: int, *, at: Sequence[int] | None = None) -> Topic:
        _refuse(
            f"Topic {name!r} cannot get more partitions on Kafka without its keys losing their order.",
            "Create another topic with more partitions and copy the events to it in order.",
        )

    def reached(self, name: str, partition: int, *, offset: int) -> int:
        _refuse(
            f"Kafka does not keep how far event time had come in topic {name!r}.",
            "Read it without the columns _late and _watermark; applications have them on Kafka too.",
        )

    def heartbeat(self, name: str, partition: int, *, time: int, appended_before: int) -> bool:
        _refuse("A topic on Kafka has no heartbeats.", "Append an event of your own whose time is the present.")

    def heartbeats(self, name: str, partition: int) -> Sequence[Any]:
        """There are none."""
        return ()

    def place(self, write: Write, offsets: Any, *, end: int) -> None:
        _refuse(
            f"Events {write.at} to {end - 1} of partition {write.partition} of topic {write.topic.name!r} have gaps between their "
            "offsets, or are gone, and Kafka gives every event the next offset.",
            "Mirror this topic into a log in a folder, which keeps the gaps; or read it and append it to a topic on Kafka, where "
            "its events get new offsets.",
        )

    def delete_queue(self, group: str, topic: str) -> None:
        _refuse("Queues on Kafka are not removed from here.", "Use the broker's own kafka-share-groups.")


def topic_settings(topic: Topic) -> dict[str, str]:
    """Retention and compaction as Kafka calls them; refuses what it cannot do."""
    if topic.archive is not None:
        _refuse(f"Topic {topic.name!r} cannot have an archive on Kafka.", "Use the brokers' own tiered storage.")
    if topic.bytes_max is not None or topic.overload == "buffer":
        _refuse(
            f"Topic {topic.name!r} cannot have bytes_max= or overload='buffer' on Kafka.",
            "Use retention_bytes=, or quotas.",
        )
    if topic.retain != "all":
        _refuse(
            f"Topic {topic.name!r} cannot have retain={topic.retain!r} on Kafka, whose brokers do not look at what was done.",
            "Use retention=.",
        )
    return {
        "retention.ms": "-1" if topic.retention_us is None else str(topic.retention_us // 1000),
        "retention.bytes": "-1" if topic.retention_bytes is None else str(topic.retention_bytes),
        "cleanup.policy": "compact" if topic.compact else "delete",
        "delete.retention.ms": str(topic.tombstones_us // 1000),
    }


def _refuse(what: str, advice: str) -> NoReturn:
    raise Unsupported(what, advice=advice)
