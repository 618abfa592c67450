"""The orders of the demonstration: what each shop sells can be computed again, so that the log can be checked against it."""

from __future__ import annotations

import math
import zlib
from datetime import datetime
from typing import Any

TOPIC = "orders"
SCHEMA = "id STRING NOT NULL, shop STRING, number BIGINT, product STRING, amount DOUBLE, at TIMESTAMP"
SHOPS = ("north", "east", "south", "west")

_PRODUCTS = (("espresso", 2.4), ("flat white", 3.8), ("filter", 3.2), ("cortado", 3.1), ("beans", 14.5), ("mug", 12.0))
_OFTEN = (0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 5)


def sale(shop: str, number: int) -> tuple[str, float]:
    """What a shop sells as its order with this number: product and amount."""
    dice = zlib.crc32(f"{shop}-{number}".encode("ascii"))
    product, price = _PRODUCTS[_OFTEN[dice % len(_OFTEN)]]
    return product, round(price * (1 + dice // 64 % 3), 2)


def order(shop: str, number: int, at: datetime) -> dict[str, Any]:
    """The event of that sale."""
    product, amount = sale(shop, number)
    return {"id": f"{shop}-{number}", "shop": shop, "number": number, "product": product, "amount": amount, "at": at}


def orders_until(elapsed_s: float, *, rate: float, phase: float) -> int:
    """How many orders a shop has had after so many seconds: about `rate` each second, with busy and quiet moments."""
    waves = 0.45 * (math.sin(1.3 * elapsed_s + phase) - math.sin(phase))
    return max(0, int(rate * (elapsed_s + waves)))
