"""The events of Nexmark: persons who come, auctions that they open and bids that they place, as a function from event number to row.

Of each 50 events the first is a person, the next three are auctions and the other 46 are bids: proportions are exact, and the id of a
person or an auction follows from its event number. Event `n` happens at `start_us + n * period_us`, so no two events have the same time
and "the last bid" or "the first of the highest" needs no further rule.

What is drawn, as the public specification describes it:

    who is bid for      every second bid goes to the hot auction (the newest whose number is a multiple of 100), the others to one of the
                        100 newest
    who bids, sells     three of four times the hot bidder, the hot seller (they change with each 100 persons), else one of the 1,000 newest
    prices              100 to 100,000,000, evenly in their logarithm; an auction's reserve lies above its first price
    expires             up to twice the time in which 100 more auctions are opened
    category            10 to 14
    channel, url        every second bid comes from one of four channels with one url each; the others from one of 10,000, of whose
                        urls nine of ten name the channel
    extra               letters that bring an event to about the size that the specification asks for

Unlike the specification's program nobody refers to what does not exist yet: a bid's auction and bidder and an auction's seller happened
before it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from examples.nexmark.draws import Draws, Numbers

PERSONS, AUCTIONS, BIDS = 1, 3, 46
CYCLE = PERSONS + AUCTIONS + BIDS
FIRST_ID, FIRST_CATEGORY = 1_000, 10
CATEGORIES = 5
START_US = 1_735_689_600_000_000  # 2025-01-01: in the past, so that no log takes the times for a wrong clock
PERIOD_US = 100  # 10,000 events a second
AUCTIONS_OPEN, PERSONS_ACTIVE, HOT_EVERY = 100, 1_000, 100
HORIZON = AUCTIONS_OPEN * CYCLE // AUCTIONS

_STATES = ["AZ", "CA", "ID", "OR", "WA", "WY"]
_CITIES = ["Tucson", "Oakland", "Fresno", "Boise", "Salem", "Eugene", "Spokane", "Tacoma", "Everett", "Laramie"]
_FIRST_NAMES = ["Ada", "Bela", "Chidi", "Dora", "Emil", "Femi", "Greta", "Hugo", "Ines", "Jun", "Kofi", "Lena"]
_LAST_NAMES = ["Abbott", "Brandt", "Castro", "Dietz", "Eze", "Falk", "Grau", "Holm", "Ito", "Juarez"]
_HOT_CHANNELS = ["Google", "Facebook", "Baidu", "Apple"]
_CHANNELS = 10_000
_PRICES = 1 << 16
_PRICE_MIN, _PRICE_DECADES = 100, 6
_POOL = 4_096
_TIMESTAMP = pa.timestamp("us", "UTC")


@dataclasses.dataclass(frozen=True)
class Nexmark:
    """The events of one seed. Rows come in the order of the event numbers that are asked for, which may be any."""

    seed: int = 0
    period_us: int = PERIOD_US
    start_us: int = START_US

    def tables(self, numbers: Numbers) -> dict[str, pa.Table]:
        """The rows of these event numbers, by topic."""
        place = numbers % CYCLE
        return {
            "persons": self.persons(numbers[place < PERSONS]),
            "auctions": self.auctions(numbers[(place >= PERSONS) & (place < PERSONS + AUCTIONS)]),
            "bids": self.bids(numbers[place >= PERSONS + AUCTIONS]),
        }

    def persons(self, numbers: Numbers) -> pa.Table:
        """The persons who come with these event numbers."""
        pick = functools.partial(self._pick, numbers=numbers)
        # An address as 7 letters, "@", 5 letters, ".com"; a card as four groups of four digits.
        address = pc.binary_join_element_wise(
            pick(self._pools.words_7, "mailbox"), pick(self._pools.words_5, "host"), "@"
        )
        groups = [pick(self._pools.digits, f"card {group}") for group in range(4)]
        return pa.table(
            {
                "id": FIRST_ID + numbers // CYCLE,
                "name": pick(self._pools.names, "name"),
                "emailAddress": pc.binary_join_element_wise(address, ".com", ""),
                "creditCard": pc.binary_join_element_wise(*groups, " "),
                "city": pick(self._pools.cities, "city"),
                "state": pick(self._pools.states, "state"),
                "dateTime": self._times(numbers),
                "extra": pick(self._pools.extras_person, "extra"),
            }
        )

    def auctions(self, numbers: Numbers) -> pa.Table:
        """The auctions that are opened with these event numbers."""
        draws = self._draws
        first_price = self._prices[draws.below(_PRICES, "first price", numbers)]
        open_events = 1 + draws.below(2 * HORIZON, "open", numbers)
        newest = numbers // CYCLE
        hot, other = newest - newest % HOT_EVERY, self._one_of_newest(newest, PERSONS_ACTIVE, "seller", numbers)
        return pa.table(
            {
                "id": FIRST_ID + newest * AUCTIONS + numbers % CYCLE - PERSONS,
                "itemName": self._pick(self._pools.items, "item", numbers),
                "description": self._pick(self._pools.descriptions, "description", numbers),
                "initialBid": first_price,
                "reserve": first_price + self._prices[draws.below(_PRICES, "reserve", numbers)],
                "dateTime": self._times(numbers),
                "expires": self._times(numbers + open_events),
                "seller": FIRST_ID + np.where(draws.chance(3 / 4, "hot seller", numbers), hot, other),
                "category": FIRST_CATEGORY + draws.below(CATEGORIES, "category", numbers),
                "extra": self._pick(self._pools.extras_auction, "extra", numbers),
            }
        )

    def bids(self, numbers: Numbers) -> pa.Table:
        """The bids that are placed with these event numbers."""
        draws = self._draws
        person = numbers // CYCLE
        auction = person * AUCTIONS + AUCTIONS - 1
        hot_auction = auction - auction % HOT_EVERY
        hot_bidder = np.minimum(person - person % HOT_EVERY + 1, person)
        other_auction = self._one_of_newest(auction, AUCTIONS_OPEN, "auction", numbers)
        other_bidder = self._one_of_newest(person, PERSONS_ACTIVE, "bidder", numbers)
        hot_channel = draws.below(len(_HOT_CHANNELS), "hot channel", numbers)
        other_channel = len(_HOT_CHANNELS) + draws.below(_CHANNELS, "channel", numbers)
        channel = pa.array(np.where(draws.chance(1 / 2, "from hot channel", numbers), hot_channel, other_channel))
        return pa.table(
            {
                "auction": FIRST_ID + np.where(draws.chance(1 / 2, "hot auction", numbers), hot_auction, other_auction),
                "bidder": FIRST_ID + np.where(draws.chance(3 / 4, "hot bidder", numbers), hot_bidder, other_bidder),
                "price": self._prices[draws.below(_PRICES, "price", numbers)],
                "channel": self._pools.channels.take(channel),
                "url": self._pools.urls.take(channel),
                "dateTime": self._times(numbers),
                "extra": self._pick(self._pools.extras_bid, "extra", numbers),
            }
        )

    def _times(self, numbers: Numbers) -> pa.Array:
        return pa.array(self.start_us + numbers * self.period_us).view(_TIMESTAMP)

    def _one_of_newest(self, newest: Numbers, count: int, purpose: str, numbers: Numbers) -> Numbers:
        return newest - self._draws.below(np.minimum(newest + 1, count), purpose, numbers)

    def _pick(self, pool: pa.Array, purpose: str, numbers: Numbers) -> pa.Array:
        return pool.take(pa.array(self._draws.below(len(pool), purpose, numbers)))

    @functools.cached_property
    def _draws(self) -> Draws:
        return Draws(self.seed)

    @functools.cached_property
    def _prices(self) -> Numbers:
        # Looked up: a power for each event would be slower, and its last digit could differ between machines.
        steps = np.arange(_PRICES) / _PRICES * _PRICE_DECADES
        return np.round(_PRICE_MIN * 10.0**steps).astype(np.int64)

    @functools.cached_property
    def _pools(self) -> _Pools:
        return _Pools(self._draws)


class _Pools:
    """The strings that rows take theirs from; made once for a seed, those that nobody asks for not at all."""

    def __init__(self, draws: Draws) -> None:
        self._words: Callable[..., pa.StringArray] = functools.partial(draws.words, _POOL)
        self._draws = draws
        self.states, self.cities = pa.array(_STATES), pa.array(_CITIES)
        self.names = pa.array([f"{first} {last}" for first in _FIRST_NAMES for last in _LAST_NAMES])

    @functools.cached_property
    def words_7(self) -> pa.StringArray:
        return self._words(7, 7, "mailboxes")

    @functools.cached_property
    def words_5(self) -> pa.StringArray:
        return self._words(5, 5, "hosts")

    @functools.cached_property
    def digits(self) -> pa.Array:
        return pa.array([f"{number:04}" for number in range(10_000)])

    @functools.cached_property
    def items(self) -> pa.StringArray:
        return self._words(3, 20, "items", spaces=True)

    @functools.cached_property
    def descriptions(self) -> pa.StringArray:
        return self._words(3, 100, "descriptions", spaces=True)

    @functools.cached_property
    def extras_person(self) -> pa.StringArray:
        return self._words(100, 150, "extras of persons", spaces=True)

    @functools.cached_property
    def extras_auction(self) -> pa.StringArray:
        return self._words(310, 470, "extras of auctions", spaces=True)

    @functools.cached_property
    def extras_bid(self) -> pa.StringArray:
        return self._words(54, 82, "extras of bids", spaces=True)

    @functools.cached_property
    def channels(self) -> pa.Array:
        return pa.array(_HOT_CHANNELS + [f"channel-{number}" for number in range(_CHANNELS)])

    @functools.cached_property
    def urls(self) -> pa.Array:
        count = len(_HOT_CHANNELS) + _CHANNELS
        folders = [self._draws.words(count, 5, 5, f"folder {place}") for place in range(3)]
        pages = pc.binary_join_element_wise("https://auctions.example", *folders, "item.htm?query=1", "/")
        channel = np.arange(count) - len(_HOT_CHANNELS)
        names = self._draws.chance(9 / 10, "url names its channel", channel) & (channel >= 0)
        named = pc.binary_join_element_wise(pages, pa.array(channel).cast(pa.string()), "&channel_id=")
        return pc.if_else(pa.array(names), named, pages)
