"""The topics of Nexmark: an auction house's persons, auctions and bids, with the columns that the public specification gives them.

`dateTime` is the event time. Its lateness is what the specification's watermark allows. The module imports nothing of the example, so
that an application beside it (`from topics import TOPICS`) and a program at the repository's root (`from examples.nexmark.topics
import TOPICS`) both find it.
"""

from __future__ import annotations

from typing import NamedTuple

TIME = "dateTime"
LATENESS = "4 seconds"


class Topic(NamedTuple):
    """What a topic is made with: `app.topic("bids", **TOPICS["bids"].declared())`."""

    schema: str
    key: str

    def declared(self, lateness: str = LATENESS) -> dict[str, str]:
        """The arguments of `log.create_topic` and `app.topic` behind the name."""
        return {"schema": self.schema, "key": self.key, "time": TIME, "lateness": lateness}


PERSONS = Topic(
    "id BIGINT, name STRING, emailAddress STRING, creditCard STRING, city STRING, state STRING,"
    " dateTime TIMESTAMP, extra STRING",
    key="id",
)
AUCTIONS = Topic(
    "id BIGINT, itemName STRING, description STRING, initialBid BIGINT, reserve BIGINT,"
    " dateTime TIMESTAMP, expires TIMESTAMP, seller BIGINT, category BIGINT, extra STRING",
    key="id",
)
BIDS = Topic(
    "auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, dateTime TIMESTAMP, extra STRING",
    key="auction",
)
TOPICS = {"persons": PERSONS, "auctions": AUCTIONS, "bids": BIDS}
