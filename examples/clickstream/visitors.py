"""People who click: sends events to the topic `clicks` until Ctrl-C, or for as many seconds as the second argument says."""

import random
import sys
import time
from datetime import UTC, datetime, timedelta

import headwater as hw

PAGES = ["/", "/products", "/products/1?from=mail", "/products/2", "/cart", "/checkout", "/help", "/health"]


def main(url: str = "./clickstream", seconds: float = 3600.0, per_second: float = 500.0) -> None:
    """Clicks arrive up to five seconds after they happened, as from phones."""
    chance = random.Random(7)
    with hw.open_log(url) as log, log.producer() as producer:
        log.create_topic(
            "clicks",
            "user_id BIGINT, page STRING, at TIMESTAMP",
            key="user_id",
            time="at",
            lateness="1 minute",
            exist_ok=True,
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(int(per_second / 20)):
                page = chance.choices(PAGES, weights=range(len(PAGES), 0, -1))[0]
                at = datetime.now(UTC) - timedelta(seconds=chance.expovariate(2) % 5)
                producer.send("clicks", {"user_id": chance.randrange(10_000), "page": page, "at": at})
            time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(float, sys.argv[2:]))
