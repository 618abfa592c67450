"""Two caches of a shop's products: one that the programs write themselves, one that follows the log. No Spark, no server.

The second cache is kept by one reader of the captured table, which sees every change, once, in the order of the database.

python examples/in_sync/dual_writes.py
"""

import tempfile
import threading
import time
from pathlib import Path

from clients import Clients, Shop

import headwater as hw


class Caches:
    """The shop, its clients with a cache of theirs, and the other cache: products by their number, in memory."""

    def __init__(self, folder, seed=1):
        self.written, self.derived = {}, {}
        self.shop = Shop(f"sqlite:///{Path(folder) / 'shop.db'}")
        self.shop.make()
        self.clients = Clients(self.shop, lambda product, row: put(self.written, product, row), seed=seed)
        self.log = hw.open_log(Path(folder) / "log")
        self.capture = hw.Capture(self.log, self.shop.url)
        self.capture.open()
        self.stop = threading.Event()
        self.threads = [
            threading.Thread(target=self.capture.run, args=(self.stop,)),
            threading.Thread(target=self.follow),
        ]

    def follow(self):
        """The only writer of the derived cache."""
        with self.log.reader("products") as reader:
            while not self.stop.is_set():
                for event in reader.poll(timeout_s=0.1):
                    put(self.derived, event.key, event.value)

    def drift(self):
        """How many products are wrong in the written cache by a lost write, how many by a race, and how many in the derived one.

        It is a moment when nobody writes, and everything that was written has arrived, if it ever will.
        """
        with self.shop.at_rest() as database:
            truth = dict(database.execute("SELECT product_id, price FROM products").fetchall())
            time.sleep(0.2)
            deadline = time.monotonic() + 30
            while wrong(truth, self.derived) and time.monotonic() < deadline:
                time.sleep(0.01)
            found = wrong(truth, self.written)
            lost = found & self.clients.failed
            return len(lost), len(found - lost), len(wrong(truth, self.derived))

    def run(self, looks, pause_s=1.0):
        """Lets everybody write, and looks now and then; gives the drift at each look."""
        for thread in self.threads:
            thread.start()
        self.clients.start()
        try:
            for _ in range(looks):
                time.sleep(pause_s)
                yield self.drift()
        finally:
            self.clients.stop()
            self.stop.set()
            for thread in self.threads:
                thread.join()
            self.log.close()


def put(cache, product, row):
    """Sets a product, or with None removes it."""
    if row is None:
        cache.pop(product, None)
    else:
        cache[product] = row["price"]


def wrong(truth, cache):
    """The products that a cache has otherwise than the database."""
    copy = dict(cache)
    return {product for product in truth.keys() | copy.keys() if truth.get(product) != copy.get(product)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for lost, raced, derived in Caches(folder).run(looks=10):
            print(
                f"wrong products: {lost + raced:3} where programs write twice ({lost} lost, {raced} overtaken), "
                f"{derived} where one reader follows the log"
            )
