"""True time: what a device's clock should have said.

A phone notes when something occurred by its own clock, and sends it much later; the clock may be wrong by hours. It also notes when
it sends, and the server when it receives. Sending takes a moment, so the difference of those two is how wrong the clock is.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F


def true_time(occurred: Column | str, sent: Column | str, received: Column | str) -> Column:
    """When something occurred by the clock of who received it: `occurred` and `sent` are a device's times, `received` is ours.

    Where one of the two last is not known, the device's clock is believed.
    """
    told, out, taken = (
        F.unix_micros(F.col(each) if isinstance(each, str) else each) for each in (occurred, sent, received)
    )
    return F.timestamp_micros(F.coalesce(told + (taken - out), told))
