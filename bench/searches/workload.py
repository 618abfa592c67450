"""The documents and the saved searches, drawn by a seed: words by Zipf's law, so that few are in many documents and most in few.

What is drawn:

    documents       60 to 200 of 50,000 words, a price, rooms, an area and one of 20 categories
    words sought    half as documents have them, without the 100 most frequent; half evenly in the logarithm of the rank
    searches        60 % conjunctions of 2 to 4 words, 15 % phrases of 2 or 3 words (half of them copied from documents),
                    10 % OR and NOT, 10 % a word and a range (three of ten with a category too), 5 % prefixes

The first searches of a larger set are those of a smaller one.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

WORDS = 50_000
DOCUMENTS = 20_000
STOP_RANKS = 100
CATEGORIES = 20
SEED_DOCUMENTS, SEED_SEARCHES = 42, 7
_CONSONANTS, _VOWELS = "bcdfghklmnprstvz", "aeiou"
_SYLLABLES = [consonant + vowel for vowel in _VOWELS for consonant in _CONSONANTS]
_RANGES = {"price": (50_000, 2_000_000), "area": (20, 400), "rooms": (1, 8)}


@dataclass(frozen=True)
class Conjunction:
    """Documents with all words."""

    words: tuple[str, ...]

    def text(self) -> str:
        """In Lucene's language."""
        return " AND ".join(self.words)

    def line(self) -> str:
        """For the peer: a letter and what follows, with tabs between."""
        return f"A\t{' '.join(self.words)}"


@dataclass(frozen=True)
class Phrase:
    """Documents with these words next to each other."""

    words: tuple[str, ...]

    def text(self) -> str:
        """In Lucene's language."""
        return f'"{" ".join(self.words)}"'

    def line(self) -> str:
        """For the peer."""
        return f"P\t{' '.join(self.words)}"


@dataclass(frozen=True)
class Choice:
    """Documents with all words of `must`, one of `either` and none of `never`."""

    must: tuple[str, ...]
    either: tuple[str, ...]
    never: tuple[str, ...]

    def text(self) -> str:
        """In Lucene's language."""
        parts = [f"+{word}" for word in self.must] + [f"+({' OR '.join(self.either)})"]
        return " ".join([*parts, *(f"-{word}" for word in self.never)])

    def line(self) -> str:
        """For the peer."""
        return "\t".join(["B", *(" ".join(words) for words in (self.must, self.either, self.never))])


@dataclass(frozen=True)
class Range:
    """Documents with a word, a number from `low` to `high` and, if given, a category."""

    word: str
    field: str
    low: int
    high: int
    category: str | None

    def text(self) -> str:
        """In Lucene's language."""
        parts = [self.word, f"{self.field}:[{self.low} TO {self.high}]"]
        return " AND ".join(parts + ([f"category:{self.category}"] if self.category else []))

    def line(self) -> str:
        """For the peer."""
        return f"R\t{self.word}\t{self.field}\t{self.low}\t{self.high}\t{self.category or ''}"


@dataclass(frozen=True)
class Prefix:
    """Documents with a word that begins so and, if given, another word."""

    prefix: str
    word: str | None

    def text(self) -> str:
        """In Lucene's language."""
        return f"{self.prefix}*" + (f" AND {self.word}" if self.word else "")

    def line(self) -> str:
        """For the peer."""
        return f"X\t{self.prefix}\t{self.word or ''}"


Search = Conjunction | Phrase | Choice | Range | Prefix


@functools.cache
def words() -> list[str]:
    """All words by rank, each of three syllables."""
    numbers = [(rank * 7919 + 13) % len(_SYLLABLES) ** 3 for rank in range(WORDS)]
    return [_SYLLABLES[number % 80] + _SYLLABLES[number // 80 % 80] + _SYLLABLES[number // 6400] for number in numbers]


@functools.cache
def documents(count: int = DOCUMENTS) -> pa.Table:
    """The documents: `document`, `body`, `price`, `rooms`, `area`, `category`."""
    draws = np.random.default_rng(SEED_DOCUMENTS)
    lengths = draws.integers(60, 201, DOCUMENTS)
    ranks = np.searchsorted(np.cumsum(_shares()), draws.random(int(lengths.sum()))).clip(0, WORDS - 1)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    by_rank = words()
    bodies = [
        " ".join(by_rank[rank] for rank in ranks[start:end].tolist())
        for start, end in itertools.pairwise(offsets[: count + 1].tolist())
    ]
    table = pa.table(
        {
            "document": np.arange(DOCUMENTS),
            "price": draws.integers(50, 2001, DOCUMENTS) * 1000,
            "rooms": draws.integers(1, 9, DOCUMENTS),
            "area": draws.integers(20, 401, DOCUMENTS),
            "category": [f"c{number}" for number in draws.integers(0, CATEGORIES, DOCUMENTS)],
        }
    )
    return table.slice(0, count).append_column("body", pa.array(bodies))


def searches(count: int) -> Iterator[Search]:
    """So many searches."""
    draw = _Draw(random.Random(SEED_SEARCHES))
    for _ in range(count):
        yield draw.search()


class _Draw:
    """Draws searches."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        shares = _shares()[STOP_RANKS:]
        self._cumulated = np.cumsum(shares / shares.sum()).tolist()
        self._words = words()
        self._bodies = documents().column("body").to_pylist()

    def search(self) -> Search:
        """The next one."""
        kind = self._random.random()
        if kind < 0.60:
            return Conjunction(self._some(self._random.randint(2, 4)))
        if kind < 0.75:
            return Phrase(self._neighbours())
        if kind < 0.85:
            must, either, never = self._random.randint(0, 1), self._random.randint(2, 3), self._random.randint(0, 2)
            found = self._some(must + either + never)
            return Choice(found[:must], found[must : must + either], found[must + either :])
        return self._range() if kind < 0.95 else self._prefix()

    def _range(self) -> Range:
        field = self._random.choice(list(_RANGES))
        low, high = sorted(self._random.randint(*_RANGES[field]) for _ in range(2))
        category = f"c{self._random.randrange(CATEGORIES)}" if self._random.random() < 0.3 else None
        return Range(self._word(), field, low, high, category)

    def _prefix(self) -> Prefix:
        prefix = self._word()[: 5 if self._random.random() < 0.5 else 4]
        return Prefix(prefix, self._word() if self._random.random() < 0.5 else None)

    def _neighbours(self) -> tuple[str, ...]:
        count = 2 if self._random.random() < 0.7 else 3
        if self._random.random() < 0.5:
            return self._some(count)
        body = self._random.choice(self._bodies).split(" ")
        start = self._random.randrange(len(body) - count)
        return tuple(body[start : start + count])

    def _some(self, count: int) -> tuple[str, ...]:
        found: dict[str, None] = {}
        while len(found) < count:
            found[self._word()] = None
        return tuple(found)

    def _word(self) -> str:
        if self._random.random() < 0.5:
            rank = STOP_RANKS + bisect.bisect_left(self._cumulated, self._random.random())
        else:
            rank = int(STOP_RANKS * (WORDS / STOP_RANKS) ** self._random.random())
        return self._words[min(rank, WORDS - 1)]


def _shares() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """How often each word occurs, by rank."""
    shares = 1 / (np.arange(1, WORDS + 1) + 2.7)
    return shares / shares.sum()
