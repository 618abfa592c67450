"""A position: where one event stands in a log."""

from __future__ import annotations

import msgspec


class Position(msgspec.Struct, frozen=True, order=True, gc=False):
    """The place of one event: topic, partition, offset, and the incarnation of the log that gave it.

    The incarnation rises whenever the log is opened after an unclean stop of the machine. With `durability="os"` such a
    stop can take events back; a position from before is then refused instead of silently naming another event.
    """

    topic: str
    partition: int
    offset: int
    incarnation: int = 0
