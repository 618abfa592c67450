"""What a log on Kafka does not do, and what to do instead. The topic's retention and compaction are Kafka's own settings."""

from __future__ import annotations

from typing import Any, NoReturn

from headwater.log.queue_states import QueueStates
from headwater.log.topic import Topic
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

    def queue_states(self, group: str, topic: Topic, *, has_keys: bool) -> QueueStates:
        _refuse("Queues are for logs in a folder or in memory.", "Mirror the topic into a folder and work on it there.")

    def queues(self) -> list[dict[str, Any]]:
        """There are none."""
        return []


def topic_settings(topic: Topic) -> dict[str, str]:
    """Retention and compaction as Kafka calls them; refuses what it cannot do."""
    if topic.archive is not None:
        _refuse(f"Topic {topic.name!r} cannot have an archive on Kafka.", "Use the brokers' own tiered storage.")
    if topic.bytes_max is not None:
        _refuse(f"Topic {topic.name!r} cannot have bytes_max= on Kafka.", "Use retention_bytes=, or quotas.")
    return {
        "retention.ms": "-1" if topic.retention_us is None else str(topic.retention_us // 1000),
        "retention.bytes": "-1" if topic.retention_bytes is None else str(topic.retention_bytes),
        "cleanup.policy": "compact" if topic.compact else "delete",
        "delete.retention.ms": str(topic.tombstones_us // 1000),
    }


def _refuse(what: str, advice: str) -> NoReturn:
    raise Unsupported(what, advice=advice)
