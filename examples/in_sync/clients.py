"""A shop's database, and the programs that write to it: each change goes to the database, and then to a cache of the same products.

Two things go wrong with the second write, and nobody notices. Two programs write the same product at about the same time, and the
cache gets them in another order than the database did (the race). Or the write to the cache fails after the database has
committed. Here both happen more often than in most shops, so that nobody has to wait for them: the cache takes up to 20 ms, and
does not answer one time in 50.
"""

import random
import sqlite3
import threading
import time
from contextlib import closing, contextmanager

CLIENTS = 4
PAUSE_S = 0.02
BUSY = 20
"""So many products change at a time; every moment another one joins and the oldest is left as it is."""

CACHE_S_MAX = 0.02
FAILURE = 0.02

CATEGORIES = ("bicycles", "books", "lamps", "tea")
COLOURS = ("red", "green", "blue", "white", "black")

_TABLE = "CREATE TABLE products (product_id INTEGER PRIMARY KEY, name TEXT, category TEXT, price INTEGER)"
_VIEW = (
    "CREATE VIEW per_category AS "
    "SELECT category, count(*) AS products, sum(price) AS value FROM products GROUP BY category"
)
_PUT = (
    "INSERT INTO products (product_id, name, category, price) VALUES (?, ?, ?, ?) ON CONFLICT (product_id) "
    "DO UPDATE SET name = excluded.name, category = excluded.category, price = excluded.price"
)
_REMOVE = "DELETE FROM products WHERE product_id = ?"


class Shop:
    """The database: `sqlite:///shop.db`, or `postgresql://me@host/shop`."""

    def __init__(self, url):
        self.url = url
        self.is_postgres = url.startswith("postgres")

    def make(self):
        """The table, and what the database itself says of each category: what is derived is compared with these."""
        with closing(self.connect()) as database:
            if not self.is_postgres:
                database.execute("PRAGMA journal_mode = wal")
            database.execute(_TABLE)
            database.execute(_VIEW)

    def remove(self):
        """Takes both away again."""
        with closing(self.connect()) as database:
            database.execute("DROP VIEW per_category")
            database.execute("DROP TABLE products")

    def connect(self):
        """A connection, as every program has its own."""
        if self.is_postgres:
            import psycopg

            return psycopg.connect(self.url, autocommit=True)
        path = self.url.removeprefix("sqlite:///")
        connection = sqlite3.connect(path, isolation_level=None, timeout=600, check_same_thread=False)
        connection.execute("PRAGMA synchronous = normal")
        return connection

    def put(self, product, row):
        """Sets a product, or with None removes it, by a connection that is closed again."""
        with closing(self.connect()) as database:
            self.write(database, product, row)

    def write(self, database, product, row):
        """Sets a product, or with None removes it."""
        sql, values = (_REMOVE, (product,)) if row is None else (_PUT, tuple(row.values()))
        database.execute(sql.replace("?", "%s") if self.is_postgres else sql, values)

    @contextmanager
    def at_rest(self):
        """While this is held everybody reads, and nobody writes."""
        with closing(self.connect()) as database:
            database.execute("BEGIN" if self.is_postgres else "BEGIN IMMEDIATE")
            if self.is_postgres:
                database.execute("LOCK TABLE products IN EXCLUSIVE MODE")
            yield database
            database.execute("ROLLBACK")


class Clients:
    """Programs that write everything twice, as programs do. `put(product, row)` is what writes to the cache."""

    def __init__(self, shop, put, *, seed=1):
        self.shop, self.put, self.seed = shop, put, seed
        self.writes = 0
        self.failed = set()
        """The products whose last write to the cache failed. A real shop does not know them."""
        self.started_s = time.monotonic()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]

    def start(self):
        """Lets everybody write."""
        for thread in self._threads:
            thread.start()

    def stop(self):
        """Returns when nobody writes any more."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number):
        chance = random.Random(f"{self.seed}.{number}")
        with closing(self.shop.connect()) as database:
            while not self._stop.wait(chance.random() * 2 * PAUSE_S):
                product = int(20 * (time.monotonic() - self.started_s)) + chance.randrange(BUSY)
                row = None if chance.random() < 0.2 else _drawn(product, chance)
                self.shop.write(database, product, row)
                self._write_again(product, row, chance)

    def _write_again(self, product, row, chance):
        time.sleep(chance.random() * CACHE_S_MAX)
        is_lost = chance.random() < FAILURE
        if not is_lost:
            self.put(product, row)
        # Where it failed the database has committed: there is no way back, and nobody to tell.
        with self._lock:
            self.writes += 1
            (self.failed.add if is_lost else self.failed.discard)(product)


def _drawn(product, chance):
    category = chance.choice(CATEGORIES)
    name = f"{chance.choice(COLOURS)} {category.removesuffix('s')} {product}"
    return {"product_id": product, "name": name, "category": category, "price": chance.randrange(1, 1000)}
