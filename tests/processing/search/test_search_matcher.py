"""Matching: what the index finds is what plain Python finds, for random searches of every construct."""

from __future__ import annotations

from random import Random

import numpy as np
import pyarrow as pa
import pytest

from headwater.processing.search.analysis import Analyzer
from headwater.processing.search.compiler import compile_searches
from headwater.processing.search.documents import Documents
from headwater.processing.search.fields import HIGHEST, LOWEST, SearchFields
from headwater.processing.search.grammar import parse_search
from headwater.processing.search.joint import joined
from headwater.processing.search.matcher import Matcher
from tests.rigs.processing.operator_runs import seeds
from tests.rigs.processing.searches import PLACES, SCHEMA, TEXTS, random_document, random_search
from tests.rigs.processing.zipf_searches import matches_by_hand, zipf_documents, zipf_searches

FIELDS = SearchFields.of(SCHEMA, TEXTS, PLACES)


@pytest.mark.parametrize("seed", seeds())
def test_what_matches_is_what_plain_python_says(seed: int) -> None:
    random = Random(seed)
    searches = [random_search(random) for _ in range(random.choice([1, 5, 150]))]
    matcher = Matcher(compile_searches([parse_search(each.text, FIELDS, Analyzer()) for each in searches], FIELDS))
    since, until = np.full(len(searches), LOWEST), np.full(len(searches), HIGHEST)
    for _ in range(2):
        rows = [random_document(random) for _ in range(random.choice([1, 60]))]
        documents = Documents(pa.Table.from_pylist(rows, SCHEMA), FIELDS, Analyzer())
        row, search = matcher.matches(documents, since, until, np.zeros(len(rows), np.int64))
        found = list(zip(row.tolist(), search.tolist(), strict=True))
        expected = {
            (at, number) for at, each in enumerate(rows) for number, one in enumerate(searches) if one.holds(each)
        }
        differs = sorted(expected ^ set(found))[:3]
        assert not differs, [(searches[number].text, rows[at], (at, number) in expected) for at, number in differs]
        assert found == sorted(set(found)), "each pair once, in the order of documents"


@pytest.mark.parametrize("seed", seeds(10))
def test_parts_that_are_joined_match_what_they_matched(seed: int) -> None:
    """Some searches are left out, and what only they ask for."""
    random = Random(seed)
    wanted = [random_search(random) for _ in range(80)]
    parts, kept, order = [], [], list[int]()
    for numbers in ([*range(30)], [30], [*range(31, 80)]):
        queries = [parse_search(wanted[number].text, FIELDS, Analyzer()) for number in numbers]
        chosen = sorted(random.sample(range(len(numbers)), random.randint(0, len(numbers))))
        parts.append(compile_searches(queries, FIELDS))
        kept.append(np.array(chosen, np.int64))
        order += [numbers[at] for at in chosen]
    whole = joined(parts, kept)
    rows = [random_document(random) for _ in range(60)]
    documents = Documents(pa.Table.from_pylist(rows, SCHEMA), FIELDS, Analyzer())
    since, until = np.full(len(order), LOWEST), np.full(len(order), HIGHEST)
    found = Matcher(whole).matches(documents, since, until, np.zeros(len(rows), np.int64))
    pairs = {(at, order[number]) for at, number in zip(found.row.tolist(), found.search.tolist(), strict=True)}
    assert pairs == {(at, number) for at, row in enumerate(rows) for number in order if wanted[number].holds(row)}
    alone = compile_searches([parse_search(wanted[number].text, FIELDS, Analyzer()) for number in order], FIELDS)
    assert len(whole) == len(alone) and whole.presences == alone.presences
    assert sorted(whole.terms) == sorted(alone.terms)


@pytest.mark.covers("Elasticsearch percolator")
@pytest.mark.parametrize(
    ("searches", "documents"),
    [(4_000, 1_000), pytest.param(100_000, 20_000, marks=[pytest.mark.bench, pytest.mark.timeout(3_600)])],
)
def test_searches_over_texts_match_what_plain_python_says(searches: int, documents: int) -> None:
    """Few words are frequent, most are rare."""
    rows = zipf_documents(documents)
    wanted = list(zipf_searches(searches, rows))
    fields = SearchFields.of(rows.schema, ["body"])
    matcher = Matcher(compile_searches([parse_search(each.text, fields, Analyzer()) for each in wanted], fields))
    since, until = np.full(searches, LOWEST), np.full(searches, HIGHEST)
    for start in range(0, documents, 5_000):
        part = rows.slice(start, 5_000)
        row, search = matcher.matches(Documents(part, fields, Analyzer()), since, until, np.zeros(len(part), np.int64))
        expected = matches_by_hand(wanted, part)
        found = set(zip(row.tolist(), search.tolist(), strict=True))
        assert not [(wanted[number].text, at) for at, number in list(found ^ expected)[:3]]
        assert len(expected) > searches // 10


def test_a_document_of_many_megabytes_is_matched_whole() -> None:
    """Its last words count, and so does a phrase that it has once."""
    fields = SearchFields.of(pa.schema([("body", pa.string())]), ["body"])
    texts = ["needle", '"silver needle"', "gold", '"needle silver"~5', "hayst*"]
    matcher = Matcher(compile_searches([parse_search(text, fields, Analyzer()) for text in texts], fields))
    rows = pa.table({"body": ["haystack " * 1_000_000 + "silver needle", "gold"]})
    always = np.full(len(texts), HIGHEST)
    found = matcher.matches(Documents(rows, fields, Analyzer()), -always, always, np.zeros(2, np.int64))
    assert list(zip(found.row.tolist(), found.search.tolist(), strict=True)) == [(0, 0), (0, 1), (0, 3), (0, 4), (1, 2)]


def test_searches_that_every_document_matches_are_bounded_in_memory() -> None:
    """Candidates are made piece by piece."""
    fields = SearchFields.of(pa.schema([("body", pa.string())]), ["body"])
    matcher = Matcher(compile_searches([parse_search("*:* -absent", fields, Analyzer())] * 1_500, fields))
    always = np.full(1_500, HIGHEST)
    rows = pa.table({"body": ["present"] * 1_999 + ["absent"]})
    found = matcher.matches(Documents(rows, fields, Analyzer()), -always, always, np.zeros(2_000, np.int64))
    assert len(found.row) == 1_999 * 1_500 and found.row.max() == 1_998
    assert matcher.always == 1_500
