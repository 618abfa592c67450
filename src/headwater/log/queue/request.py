"""A request: an event sent to a queue whose sender waits for the answer.

`log.request(topic, value)` sends the event with the headers `_correlation` (an id), `_reply_to` (the topic of replies) and
`_deadline`; whoever leases it answers with `lease.reply(value)`. The reply is an event of the reply topic with the same
`_correlation`. Replies to a topic are kept in `<topic>.replies`, made when the first request is sent, unless another is named:
without a schema a reply of bytes or text stays as it is, and anything else travels as JSON and is decoded for the sender.

A request may be executed twice (its worker died before it acknowledged); the sender sees the first reply. After the deadline
a reply is refused, because its sender no longer waits.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from headwater.log.port.topic import check_name
from headwater.log.queue.headers import CORRELATION, DEADLINE, REPLY_TO, send_event
from headwater.log.queue.queue_log import QueueLog
from headwater.log.queue.settings import check_seconds
from headwater.model.errors import InvalidInput, TimedOut
from headwater.model.event import Event

JSON = "_json"

_POLL_EVENTS = 10_000


def send_request(
    log: QueueLog,
    topic: str,
    value: Any,
    *,
    key: Any,
    timeout_s: float,
    reply_topic: str | None,
    headers: Mapping[str, bytes] | None,
) -> Event:
    """Sends a request and waits for its reply; `TimedOut` when none arrives before the deadline."""
    check_seconds(timeout_s, "timeout_s")
    replies = log.store.topic(check_name(topic)).name + ".replies" if reply_topic is None else reply_topic
    if reply_topic is None:
        log.create_topic(replies, exist_ok=True)
    correlation = uuid.uuid4().hex.encode("ascii")
    deadline = time.monotonic() + timeout_s
    asked = dict(headers or {}) | {
        CORRELATION: correlation,
        REPLY_TO: replies.encode("utf-8"),
        DEADLINE: b"%d" % (log.clock() + round(timeout_s * 1e6)),
    }
    with log.reader(replies, start="latest") as reader:
        send_event(log, topic, value, key=key, headers=asked)
        while (left := deadline - time.monotonic()) > 0:
            for event in reader.poll(events_max=_POLL_EVENTS, timeout_s=left):
                if (event.headers or {}).get(CORRELATION) == correlation:
                    return _decoded(event)
    raise TimedOut(
        f"No reply to the request on topic {topic!r} arrived within {timeout_s:g} s.",
        advice="Check that a consumer leases from that topic and replies. The request may still be executed.",
    )


def send_reply(log: QueueLog, request: Event, value: Any) -> None:
    """Answers a request."""
    headers = request.headers or {}
    if CORRELATION not in headers or REPLY_TO not in headers:
        raise InvalidInput(
            f"Event {request.offset} of topic {request.topic!r} is not a request.",
            advice="Reply only to events that log.request(…) sent.",
        )
    if log.clock() > int(headers.get(DEADLINE, b"0")):
        raise TimedOut(
            f"The deadline of the request at offset {request.offset} of topic {request.topic!r} has passed.",
            advice="Acknowledge the event, or undo the work: its sender no longer waits for the reply.",
        )
    replies = headers[REPLY_TO].decode("utf-8")
    extra = {CORRELATION: headers[CORRELATION]}
    if not log.store.topic(replies).has_schema and not isinstance(value, (bytes, str, type(None))):
        value, extra[JSON] = msgspec.json.encode(value), b"1"
    send_event(log, replies, value, key=None, headers=extra, spread_by=headers[CORRELATION].decode("ascii"))


def _decoded(event: Event) -> Event:
    if event.headers is not None and JSON in event.headers:
        return msgspec.structs.replace(event, value=msgspec.json.decode(event.value))
    return event
