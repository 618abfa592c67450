"""Searches and documents over a vocabulary in which few words are frequent and most are rare, as in texts; and which match.

The mix is that of the benchmark: 60 % conjunctions, 15 % phrases, 10 % with OR and NOT, 10 % a word with a range, 5 % prefixes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

VOCABULARY = 50_000
STOP_RANKS = 100
_CONSONANTS, _VOWELS = "bcdfghklmnprstvz", "aeiou"


class ZipfSearch(NamedTuple):
    """A search as a text, and its parts: ranks of words that must, may or must not be there, a phrase, a range, a prefix."""

    text: str
    must: tuple[int, ...] = ()
    should: tuple[int, ...] = ()
    must_not: tuple[int, ...] = ()
    phrase: tuple[int, ...] = ()
    field: str = ""
    low: int = 0
    high: int = 0
    prefix: str = ""


def word_of(rank: int) -> str:
    """A word of six letters, another one for each rank."""
    found, rest = "", (rank * 7919 + 13) % 80**3
    for _ in range(3):
        found, rest = found + _CONSONANTS[rest % 80 % 16] + _VOWELS[rest % 80 // 16], rest // 80
    return found


def _shares() -> Any:
    shares = 1 / (np.arange(1, VOCABULARY + 1) + 2.7)
    return shares / shares.sum()


def zipf_documents(count: int, seed: int = 42) -> pa.Table:
    """Documents of 60 to 200 words, with a price, rooms and an area."""
    random = np.random.default_rng(seed)
    ends = np.cumsum(random.integers(60, 201, count))
    ranks = np.searchsorted(np.cumsum(_shares()), random.random(int(ends[-1]))).clip(0, VOCABULARY - 1)
    words = [word_of(rank) for rank in range(VOCABULARY)]
    bodies = [" ".join(words[rank] for rank in part.tolist()) for part in np.split(ranks, ends[:-1])]
    return pa.table(
        {
            "id": pa.array(range(count), pa.int64()), "body": bodies, "price": random.integers(50, 2001, count) * 1000,
            "rooms": random.integers(1, 9, count), "area": random.integers(20, 401, count),
        }
    )  # fmt: skip


def zipf_searches(count: int, documents: pa.Table, seed: int = 7) -> Iterator[ZipfSearch]:
    """Searches; half of the phrases are taken from documents, so they match some."""
    random = np.random.default_rng(seed)
    shares = np.cumsum(_shares()[STOP_RANKS:])
    shares /= shares[-1]
    ranks = {word_of(rank): rank for rank in range(VOCABULARY)}

    def words(many: int) -> list[int]:
        found: list[int] = []
        while len(found) < many:
            if random.random() < 0.5:
                rank = STOP_RANKS + int(np.searchsorted(shares, random.random()))
            else:
                rank = int(STOP_RANKS * (VOCABULARY / STOP_RANKS) ** random.random())
            if rank < VOCABULARY and rank not in found:
                found.append(rank)
        return found

    def phrase() -> list[int]:
        many = 2 if random.random() < 0.7 else 3
        if random.random() < 0.5:
            return words(many)
        body = documents["body"][int(random.integers(documents.num_rows))].as_py().split(" ")
        start = int(random.integers(len(body) - many))
        return [ranks[word] for word in body[start : start + many]]

    for _ in range(count):
        kind = random.random()
        if kind < 0.60:
            must = words(int(random.integers(2, 5)))
            yield ZipfSearch(" AND ".join(map(word_of, must)), must=tuple(must))
        elif kind < 0.75:
            wanted = phrase()
            yield ZipfSearch(f'"{" ".join(map(word_of, wanted))}"', phrase=tuple(wanted))
        elif kind < 0.85:
            yield _mixed(words, int(random.integers(0, 2)), int(random.integers(2, 4)), int(random.integers(0, 3)))
        elif kind < 0.95:
            yield _ranged(words(1), random)
        else:
            prefix = word_of(words(1)[0])[: 5 if random.random() < 0.5 else 4]
            must = words(1) if random.random() < 0.5 else []
            yield ZipfSearch(" AND ".join([f"{prefix}*", *map(word_of, must)]), must=tuple(must), prefix=prefix)


def _mixed(words: Any, must: int, should: int, must_not: int) -> ZipfSearch:
    found = words(must + should + must_not)
    parts = found[:must], found[must : must + should], found[must + should :]
    texts = [f"+{word_of(rank)}" for rank in parts[0]]
    texts.append(f"+({' '.join(map(word_of, parts[1]))})")
    texts += [f"-{word_of(rank)}" for rank in parts[2]]
    return ZipfSearch(" ".join(texts), *map(tuple, parts))


def _ranged(must: list[int], random: Any) -> ZipfSearch:
    field = ("price", "area", "rooms")[int(random.integers(3))]
    low, high = {"price": (50_000, 2_000_000), "area": (20, 400), "rooms": (1, 8)}[field]
    first, last = sorted(random.integers(low, high + 1, 2).tolist())
    text = f"{word_of(must[0])} AND {field}:[{first} TO {last}]"
    return ZipfSearch(text, must=tuple(must), field=field, low=first, high=last)


def matches_by_hand(searches: list[ZipfSearch], documents: pa.Table) -> set[tuple[int, int]]:
    """Each document with each search that matches it, by the documents of each word."""
    texts = [body.split(" ") for body in documents["body"].to_pylist()]
    having: dict[str, set[int]] = {}
    for at, text in enumerate(texts):
        for word in text:
            having.setdefault(word, set()).add(at)
    columns = {name: documents[name].to_pylist() for name in ("price", "rooms", "area")}
    words, found = sorted(having), set()
    for number, search in enumerate(searches):
        needed = [having.get(word_of(rank), set()) for rank in (*search.must, *search.phrase)]
        if search.should:
            needed.append(set().union(*(having.get(word_of(rank), set()) for rank in search.should)))
        if search.prefix:
            low, high = bisect_left(words, search.prefix), bisect_left(words, search.prefix + "~")
            needed.append(set().union(*(having[word] for word in words[low:high])))
        fitting = set.intersection(*sorted(needed, key=len))
        for rank in search.must_not:
            fitting = fitting - having.get(word_of(rank), set())
        if search.field:
            fitting = {at for at in fitting if search.low <= columns[search.field][at] <= search.high}
        if search.phrase:
            wanted = [word_of(rank) for rank in search.phrase]
            fitting = {at for at in fitting if _has(texts[at], wanted)}
        found |= {(at, number) for at in fitting}
    return found


def _has(text: list[str], wanted: list[str]) -> bool:
    return any(text[at : at + len(wanted)] == wanted for at in range(len(text)))
