"""Kafka's errors as ours: which pass by themselves, and what each of the others becomes."""

from __future__ import annotations

from functools import cache
from typing import Any

from headwater.model.errors import (
    EventTooLarge,
    Fenced,
    GroupNotFound,
    HeadwaterError,
    InvalidInput,
    InvalidName,
    NoAccess,
    NotOwner,
    PositionLost,
    TopicExists,
    TopicNotFound,
    Unsupported,
)


def client_library() -> Any:
    """confluent-kafka, loaded when a `kafka://` log is opened."""
    try:
        import confluent_kafka
    except ImportError:
        raise Unsupported(
            "A kafka:// log needs the package confluent-kafka, which is not installed.",
            advice='Run: pip install "headwater[kafka]".',
        ) from None
    return confluent_kafka


@cache
def kinds() -> dict[int, tuple[type[HeadwaterError], str]]:
    """The error of ours for each of Kafka's that does not pass, and what to do about it."""
    code = client_library().KafkaError
    ask_right = "Ask for the right to do so (an ACL of the cluster), or use another user."
    return {
        code.TOPIC_AUTHORIZATION_FAILED: (NoAccess, ask_right),
        code.CLUSTER_AUTHORIZATION_FAILED: (NoAccess, ask_right),
        code.GROUP_AUTHORIZATION_FAILED: (NoAccess, ask_right),
        code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (NoAccess, ask_right),
        code.SASL_AUTHENTICATION_FAILED: (NoAccess, "Check user, password and sasl.mechanism."),
        code._AUTHENTICATION: (NoAccess, "Check user, password and sasl.mechanism."),
        code.UNKNOWN_TOPIC_OR_PART: (TopicNotFound, "See log.topics()."),
        code._UNKNOWN_TOPIC: (TopicNotFound, "See log.topics()."),
        code._UNKNOWN_PARTITION: (TopicNotFound, "See log.topic(…).partitions."),
        code.TOPIC_ALREADY_EXISTS: (TopicExists, "Open it, or pass exist_ok=True to keep it as it is."),
        code.TOPIC_EXCEPTION: (
            InvalidName,
            "Kafka takes '.' and '_' for the same: choose a name that differs otherwise.",
        ),
        code.INVALID_PARTITIONS: (InvalidInput, "Use fewer partitions."),
        code.INVALID_REPLICATION_FACTOR: (InvalidInput, "The cluster has too few brokers for its default replication."),
        code.INVALID_CONFIG: (InvalidInput, "The cluster does not allow this setting."),
        code.POLICY_VIOLATION: (InvalidInput, "The cluster has a policy against it."),
        code._AUTO_OFFSET_RESET: (PositionLost, 'Retention removed it: read from "earliest".'),
        code.OFFSET_OUT_OF_RANGE: (PositionLost, 'Retention removed it: read from "earliest".'),
        code.MSG_SIZE_TOO_LARGE: (EventTooLarge, "Raise event_bytes_max, and the brokers' own limits."),
        code.GROUP_ID_NOT_FOUND: (GroupNotFound, "See log.groups()."),
        code.UNKNOWN_MEMBER_ID: (NotOwner, "Poll again."),
        code.ILLEGAL_GENERATION: (NotOwner, "Poll again."),
        code.FENCED_INSTANCE_ID: (NotOwner, "Poll again."),
        code.REBALANCE_IN_PROGRESS: (NotOwner, "Poll again."),
        code.INVALID_SESSION_TIMEOUT: (
            InvalidInput,
            "Raise poll_interval_s_max: brokers take nothing below their group.min.session.timeout.ms (6 s).",
        ),
        code.INCONSISTENT_GROUP_PROTOCOL: (
            InvalidInput,
            "Other programs share the group's partitions otherwise: let them use the cooperative-sticky assignor.",
        ),
        code.GROUP_MAX_SIZE_REACHED: (InvalidInput, "The cluster allows no more members in one group."),
        code._FENCED: (Fenced, "Another producer with the same id took over; close this one."),
        code.INVALID_PRODUCER_EPOCH: (Fenced, "Another producer with the same id took over; close this one."),
    }


@cache
def passing() -> frozenset[int]:
    """The errors that pass by themselves: a leader is being chosen, a topic is being made."""
    code = client_library().KafkaError
    return frozenset(
        {
            code.LEADER_NOT_AVAILABLE,
            code.NOT_LEADER_FOR_PARTITION,
            code.REPLICA_NOT_AVAILABLE,
            code.REQUEST_TIMED_OUT,
            code.COORDINATOR_NOT_AVAILABLE,
            code.COORDINATOR_LOAD_IN_PROGRESS,
            code.NOT_COORDINATOR,
            code.REBALANCE_IN_PROGRESS,
            code.FENCED_LEADER_EPOCH,
            code.UNKNOWN_LEADER_EPOCH,
            code.OFFSET_NOT_AVAILABLE,
            code.NETWORK_EXCEPTION,
            code._TRANSPORT,
            code._TIMED_OUT,
            code._ALL_BROKERS_DOWN,
            code._DESTROY_BROKER,
        }
    )
