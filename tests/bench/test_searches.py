"""The figures of saved searches: the workload has the shares that it promises, and Lucene finds what brute force finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from bench.searches.lucene_side import LuceneSide
from bench.searches.workload import (
    DOCUMENTS,
    WORDS,
    Choice,
    Conjunction,
    Phrase,
    Prefix,
    Range,
    Search,
    documents,
    searches,
    words,
)

COUNT, SEARCHES = 400, 5_000
SHARES = {Conjunction: 0.60, Phrase: 0.15, Choice: 0.10, Range: 0.10, Prefix: 0.05}


def matches(search: Search, row: dict[str, Any], present: set[str]) -> bool:
    match search:
        case Conjunction(sought):
            return present.issuperset(sought)
        case Phrase(sought):
            return f" {' '.join(sought)} " in f" {row['body']} "
        case Choice(must, either, never):
            return present.issuperset(must) and not present.isdisjoint(either) and present.isdisjoint(never)
        case Range(word, field, low, high, category):
            return word in present and low <= row[field] <= high and category in (None, row["category"])
        case Prefix(prefix, word):
            return any(each.startswith(prefix) for each in present) and (word is None or word in present)


@pytest.fixture(scope="module")
def lucene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LuceneSide]:
    with LuceneSide(tmp_path_factory.mktemp("lucene")) as lucene:
        yield lucene


def test_the_words_are_different() -> None:
    assert len(set(words())) == WORDS


def test_documents_have_60_to_200_words() -> None:
    lengths = [len(body.split(" ")) for body in documents().column("body").to_pylist()]
    assert (len(lengths), min(lengths), max(lengths)) == (DOCUMENTS, 60, 200)
    assert documents(10).equals(documents().slice(0, 10))


def test_searches_have_their_shares() -> None:
    found = Counter(type(search) for search in searches(20_000))
    assert {kind: found[kind] / 20_000 for kind in SHARES} == pytest.approx(SHARES, abs=0.01)


def test_fewer_searches_are_the_first_of_more() -> None:
    assert list(searches(50)) == list(searches(200))[:50]


@pytest.mark.bench
def test_lucene_finds_what_brute_force_finds(lucene: LuceneSide) -> None:
    """One document at a time and in batches, and with every kind of search among the matches."""
    drawn = list(searches(SEARCHES))
    found: Counter[type[Search]] = Counter()
    for row in documents(COUNT).to_pylist():
        present = set(row["body"].split(" "))
        found.update(type(search) for search in drawn if matches(search, row, present))
    assert all(found[kind] for kind in SHARES), found
    assert lucene.match(COUNT, searches=SEARCHES).matches == found.total()
    assert lucene.match(COUNT, searches=SEARCHES, batch=150).matches == found.total()
