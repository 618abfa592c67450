"""How far copies of the shop have drifted from it: each is compared with the database row by row, by `headwater.verify`.

For a comparison the shop stands still: everybody reads, nobody writes. A difference counts when it stays although everything that was
committed has had the time to arrive.
"""

import json

from clients import Shop

import headwater as hw

WRITTEN_S = 0.3
DERIVED_S = 20.0
"""So long a difference must stay: a client's second write takes milliseconds, a batch of Spark longer."""


class Copy:
    """A copy of a table of the shop, by the URL that `verify` knows it by, and what was wrong in it at each look."""

    def __init__(self, name, url, *, table="products", key="product_id", settle_s=DERIVED_S):
        self.name, self.url = name, url
        self.rows, self.drifts = 0, []
        self._table, self._key, self._settle_s = table, key, settle_s

    def look(self, shop):
        """Compares it with the database, which stands still; gives the keys that differ."""
        source = f"{shop.url}{'&' if '?' in shop.url else '?'}table={self._table}"
        report = hw.verify_copy(source, self.url, key=[self._key], settle_s=self._settle_s)
        self.rows = report.rows
        self.drifts.append(report.differing + report.duplicates + len(report.unreadable))
        return {one.key[self._key] for one in report.differences}


class Drift:
    """All copies of one shop: the one that its clients write, and those that an application derives from the log."""

    def __init__(self, shop, redis):
        """`redis` is the URL of a Redis, or empty."""
        self.shop = shop
        written = f"{redis}?prefix=written:&as=json" if redis else "sqlite:///./written.db?table=products"
        self.written = Copy("Redis" if redis else "a file", written, settle_s=WRITTEN_S)
        self.derived = [
            *([Copy("Redis", f"{redis}?prefix=products:&as=json")] if redis else []),
            Copy("search", "tantivy:///./search"),
            Copy("Parquet", "delta:///./warehouse/products"),
            Copy("view", "./in_sync#per_category", table="per_category", key="category"),
        ]
        self.lost = self.overtaken = self.products = 0

    @property
    def is_none(self):
        """Whether nothing that follows the log was wrong at any look."""
        return all(copy.drifts and not any(copy.drifts) for copy in self.derived)

    def look(self, clients, *, at_derived=True):
        """Compares everything with the shop at one moment of it; or, while the application starts, the cache that clients write."""
        with self.shop.at_rest():
            wrong = self.written.look(self.shop)
            self.products = self.written.rows
            self.lost = len(wrong & clients.failed)
            self.overtaken = len(wrong) - self.lost
            for copy in self.derived if at_derived else []:
                copy.look(self.shop)


def put_into(redis):
    """What clients write to their cache with: Redis, or where there is none a file of SQLite."""
    if not redis:
        copy = Shop("sqlite:///./written.db")
        copy.make()
        return copy.put
    from redis import Redis

    client = Redis.from_url(redis)

    def put(product, row):
        name = f"written:{product}"
        if row is None:
            client.delete(name)
        else:
            client.set(name, json.dumps(row))

    return put
