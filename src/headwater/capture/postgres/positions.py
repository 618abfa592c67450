"""Positions in PostgreSQL's WAL as text that sorts as transactions committed.

    000000001a2b3c40              an end: everything that committed before this LSN (16 hexadecimal digits)
    000000001a2b3c08/00000003     the third event of the transaction whose commit stands at this LSN

A transaction's events sort behind the end of the one before it and before its own, because a commit ends where the next may begin.
Functions only, no state.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headwater.capture.byte_columns import Indexes, fixed_texts, hexadecimal

_LSN_WIDTH, _ORDER_WIDTH = 16, 8


def end_text(lsn: int) -> str:
    """An LSN as a position."""
    return f"{lsn:0{_LSN_WIDTH}x}"


def event_text(lsn: int, order: int) -> str:
    """The position of an event: the LSN of its commit, and its order in the transaction."""
    return f"{lsn:0{_LSN_WIDTH}x}/{order:0{_ORDER_WIDTH}x}"


def lsn_of(position: str) -> int:
    """The LSN of a position."""
    return int(position[:_LSN_WIDTH], 16)


def lsn_sql(lsn: int) -> str:
    """An LSN as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_texts(lsns: Indexes) -> pa.Array:
    """Many LSNs as positions."""
    return fixed_texts(hexadecimal(lsns, _LSN_WIDTH))


def event_texts(lsns: Indexes, orders: Indexes) -> pa.Array:
    """The positions of many events: the LSNs of their commits, and their order in the transaction."""
    slash = np.full((len(lsns), 1), ord("/"), np.uint8)
    return fixed_texts(np.hstack([hexadecimal(lsns, _LSN_WIDTH), slash, hexadecimal(orders, _ORDER_WIDTH)]))
