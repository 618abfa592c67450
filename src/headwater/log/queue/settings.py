"""Settings of a queue: what a handle asks for, and whether that can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headwater.log.port.topic import Topic
from headwater.log.queue.window import DELIVERIES_MAX
from headwater.model.errors import InvalidInput

Order = Literal["none", "key", "sticky"]

LEASE_S_MAX = 7 * 86_400


class QueueSettings(msgspec.Struct, frozen=True):
    """What a handle asks of its queue."""

    lease_us: int
    deliveries_max: int | None
    has_keys: bool
    is_sticky: bool
    duplicates_us: int | None


def to_settings(
    *,
    lease_s: float,
    deliveries_max: int | None,
    order: Order,
    duplicates_s: float | None,
    credit: int | None,
) -> QueueSettings:
    """The settings, if they make sense."""
    if not _is_number(lease_s) or not 0 < lease_s <= LEASE_S_MAX:
        raise InvalidInput(f"lease_s={lease_s!r} makes no sense.", advice="Use seconds, more than 0, at most a week.")
    if deliveries_max is not None and not _is_whole(deliveries_max, 1, DELIVERIES_MAX - 1):
        raise InvalidInput(
            f"deliveries_max={deliveries_max!r} makes no sense.",
            advice=f"Use 1 to {DELIVERIES_MAX - 1}, or None to deliver for ever.",
        )
    if order not in ("none", "key", "sticky"):
        raise InvalidInput(f"There is no order {order!r}.", advice='Use "none", "key" or "sticky".')
    if credit is not None and not _is_whole(credit, 1, 1 << 31):
        raise InvalidInput(f"credit={credit!r} makes no sense.", advice="Use 1 or more, or None.")
    if duplicates_s is not None and (not _is_number(duplicates_s) or duplicates_s <= 0):
        raise InvalidInput(f"duplicates_s={duplicates_s!r} makes no sense.", advice="Use seconds, more than 0.")
    return QueueSettings(
        lease_us=round(lease_s * 1e6),
        deliveries_max=deliveries_max,
        has_keys=order != "none",
        is_sticky=order == "sticky",
        duplicates_us=None if duplicates_s is None else round(duplicates_s * 1e6),
    )


def check_agrees(made: Mapping[str, Any], *, order: str, dead: str | None) -> None:
    """What all handles of a queue have to agree on was said when it was made."""
    where = f"Queue {made['group']!r} on topic {made['topic']!r}"
    if made["order"] != order:
        raise InvalidInput(f"{where} has order={made['order']!r}.", advice="Open it so, or use another group.")
    if dead is not None and made["dead"] != dead:
        raise InvalidInput(f"{where} has dead={made['dead']!r}.", advice="Open it so, or use another group.")


def check_ids_are_kept(made: Mapping[str, Any], settings: QueueSettings, *, topic: Topic) -> None:
    """Where acknowledged events are freed, the queue has to know from its first handle on how long their ids are needed."""
    known = made.get("duplicates_us") or 0
    if topic.retain == "until_acked" and (settings.duplicates_us or 0) > known:
        raise InvalidInput(
            f"Queue {made['group']!r} on topic {topic.name!r} was made with duplicates_s={known / 1e6:g}, and ids of freed "
            "events are not remembered for longer.",
            advice="Open it so, or use another group.",
        )


def check_lease(events_max: int, timeout_s: float) -> None:
    """Refuses what can never give a lease."""
    if not _is_whole(events_max, 1, 1 << 31):
        raise InvalidInput(f"events_max={events_max!r} makes no sense.", advice="Use 1 or more.")
    if not _is_number(timeout_s):
        raise InvalidInput(f"timeout_s={timeout_s!r} makes no sense.", advice="Use seconds; 0 does not wait.")


def check_seconds(s: float, what: str) -> None:
    """Refuses a duration that is none."""
    if not _is_number(s) or s <= 0:
        raise InvalidInput(f"{what}={s!r} makes no sense.", advice="Use seconds, more than 0.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
