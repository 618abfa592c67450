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
from headwater.processing.search.matcher import Matcher
from tests.rigs.processing.operator_runs import seeds
from tests.rigs.processing.searches import PLACES, SCHEMA, TEXTS, random_document, random_search

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
