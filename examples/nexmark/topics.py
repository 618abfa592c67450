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
    "id BIGINT NOT NULL, name STRING NOT NULL, emailAddress STRING NOT NULL, creditCard STRING NOT NULL,"
    " city STRING NOT NULL, state STRING NOT NULL, dateTime TIMESTAMP NOT NULL, extra STRING NOT NULL",
    key="id",
)
AUCTIONS = Topic(
    "id BIGINT NOT NULL, itemName STRING NOT NULL, description STRING NOT NULL, initialBid BIGINT NOT NULL,"
    " reserve BIGINT NOT NULL, dateTime TIMESTAMP NOT NULL, expires TIMESTAMP NOT NULL, seller BIGINT NOT NULL,"
    " category BIGINT NOT NULL, extra STRING NOT NULL",
    key="id",
)
BIDS = Topic(
    "auction BIGINT NOT NULL, bidder BIGINT NOT NULL, price BIGINT NOT NULL, channel STRING NOT NULL,"
    " url STRING NOT NULL, dateTime TIMESTAMP NOT NULL, extra STRING NOT NULL",
    key="auction",
)
TOPICS = {"persons": PERSONS, "auctions": AUCTIONS, "bids": BIDS}
