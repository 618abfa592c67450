"""Settings of a queue: the defaults, what a handle asks for, and whether that is possible.

Each default stands here and nowhere else. An argument that ends in `_s` is a number of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headwater.log.port.lease_engine import Feature, Order, QueueSettings
from headwater.log.port.topic import Topic
from headwater.log.queue.window import DELIVERIES_MAX
from headwater.model.errors import InvalidInput

GROUP = "default"
LEASE_S = 30.0
"""How long a lease lasts."""
DELIVERIES = 5
"""After so many deliveries an event becomes a dead letter."""
ORDER: Order = "none"
LEASE_EVENTS = 500
"""How many events one call of `lease` returns at most."""
LEASE_TIMEOUT_S = 1.0
"""How long `lease` waits for an event."""
NACK_DELAY_S = 0.0
NACK_REASON = "given back"
SHOWN_EVENTS = 100
"""How many events `browse` and `dead` return at most."""
REQUEST_TIMEOUT_S = 30.0
"""How long a request waits for its reply."""
ACKS_GATHERED_S = 0.005
"""How long acknowledgements of single leases are gathered before they are written."""
REDRIVE_EVENTS = 500
"""How many dead letters are sent back at once."""

LEASE_S_MAX = 7 * 86_400


def to_settings(
    *,
    lease_s: float,
    deliveries_max: int | None,
    order: Order,
    duplicates_s: float | None,
    credit: int | None,
) -> QueueSettings:
    """The settings, if they are possible; `InvalidInput`."""
    if not _is_number(lease_s) or not 0 < lease_s <= LEASE_S_MAX:
        raise InvalidInput(
            f"lease_s={lease_s!r} is not a possible length of a lease.",
            advice="Use a number of seconds: more than 0, at most a week.",
        )
    if deliveries_max is not None and not _is_whole(deliveries_max, 1, DELIVERIES_MAX - 1):
        raise InvalidInput(
            f"deliveries_max={deliveries_max!r} is not a possible number of deliveries.",
            advice=f"Use 1 to {DELIVERIES_MAX - 1}, or None to deliver without a limit.",
        )
    if order not in ("none", "key", "sticky"):
        raise InvalidInput(f"order={order!r} is not an order.", advice='Use "none", "key" or "sticky".')
    if credit is not None and not _is_whole(credit, 1, 1 << 31):
        raise InvalidInput(f"credit={credit!r} is not a number of events.", advice="Use 1 or more, or None.")
    if duplicates_s is not None:
        check_seconds(duplicates_s, "duplicates_s")
    return QueueSettings(
        lease_us=round(lease_s * 1e6),
        deliveries_max=deliveries_max,
        has_keys=order != "none",
        is_sticky=order == "sticky",
        duplicates_us=None if duplicates_s is None else round(duplicates_s * 1e6),
    )


def features_of(settings: QueueSettings, *, has_where: bool) -> list[Feature]:
    """What these settings ask of an engine, in the order in which an engine refuses it."""
    asked: dict[Feature, bool] = {
        "order='sticky'": settings.is_sticky,
        "order='key'": settings.has_keys,
        "duplicates_s=": settings.duplicates_us is not None,
        "where=": has_where,
        "deliveries_max=None": settings.deliveries_max is None,
    }
    return [feature for feature, is_asked in asked.items() if is_asked]


def check_agrees(made: Mapping[str, Any], *, order: str, dead: str | None) -> None:
    """Refuses a handle that contradicts what the queue was made with."""
    queue, advice = f"Queue {made['group']!r} on topic {made['topic']!r}", "Open it with that, or use another group."
    if made["order"] != order:
        raise InvalidInput(f"{queue} was made with order={made['order']!r}, not {order!r}.", advice=advice)
    if dead is not None and made["dead"] != dead:
        raise InvalidInput(f"{queue} was made with dead={made['dead']!r}, not {dead!r}.", advice=advice)


def check_ids_are_kept(made: Mapping[str, Any], settings: QueueSettings, *, topic: Topic) -> None:
    """Where acknowledged events are freed, the queue has to know from its first handle on how long their ids are needed."""
    known = made.get("duplicates_us") or 0
    if topic.retain == "until_acked" and (settings.duplicates_us or 0) > known:
        raise InvalidInput(
            f"Queue {made['group']!r} on topic {topic.name!r} was made with duplicates_s={known / 1e6:g}. The topic frees "
            "acknowledged events, so the queue cannot remember their ids for longer.",
            advice="Open it with that, or use another group.",
        )


def check_lease(events_max: int, timeout_s: float) -> None:
    """Refuses what can never give a lease."""
    if not _is_whole(events_max, 1, 1 << 31):
        raise InvalidInput(f"events_max={events_max!r} is not a number of events.", advice="Use 1 or more.")
    if not _is_number(timeout_s):
        raise InvalidInput(
            f"timeout_s={timeout_s!r} is not a number of seconds.", advice="Use seconds; 0 returns at once."
        )


def check_seconds(s: float, what: str) -> None:
    """Refuses what is not a number of seconds above 0."""
    if not _is_number(s) or not 0 < s < math.inf:
        raise InvalidInput(f"{what}={s!r} is not a number of seconds above 0.", advice="Use seconds, more than 0.")


def check_delay(s: float) -> None:
    """Refuses a delay that is not a number of seconds."""
    if not _is_number(s) or not abs(s) < math.inf:
        raise InvalidInput(f"delay_s={s!r} is not a number of seconds.", advice="Use seconds, such as delay_s=2.5.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
