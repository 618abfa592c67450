"""`hw.why` and highlights: what of a search holds of a document, and where."""

from __future__ import annotations

from random import Random
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.model.errors import InvalidInput
from headwater.processing.search.analysis import Analyzer
from headwater.processing.search.fields import SearchFields
from headwater.processing.search.grammar import parse_search
from headwater.processing.search.highlights import Highlighter
from tests.rigs.processing.searches import PLACES, TEXTS, random_document, random_search, words

DOCUMENT = {
    "title": "Red bicycles",
    "body": "Cheap, near the river",
    "price": 120,
    "lat": 52.5,
    "lon": 13.4,
    "color": None,
}


def test_each_clause_says_whether_it_holds_and_what_came_nearest() -> None:
    text = 'red AND bicycle AND price:<100 AND home:near(52.5, 13.5, 5km) AND "river cheap" AND "red car" AND NOT cheap AND color:*'
    found = hw.why(text, DOCUMENT, places={"home": ("lat", "lon")})
    assert not found.holds
    assert [(part.clause, part.holds, part.nearest) for part in found.parts] == [
        ("+red", True, ""),
        ("+bicycle", False, "nearest: bicycles, 1 edits away"),
        ("+price:[* TO 99]", False, "price is 120"),
        ("+home:near(52.5, 13.5, 5km)", False, "home is 6.77 km away"),
        ('+"river cheap"', False, "all words are there, but not so near each other"),
        ('+"red car"', False, "missing: car"),
        ("+color:*", False, "color has no value"),
        ("-cheap", False, ""),
    ]
    assert "no  +bicycle (nearest: bicycles, 1 edits away)" in str(found)


def test_a_query_that_does_not_parse_is_refused() -> None:
    with pytest.raises(InvalidInput, match="character 5"):
        hw.why('red "bicycle', DOCUMENT)


@pytest.mark.parametrize("seed", range(5))
def test_why_agrees_with_plain_python(seed: int) -> None:
    random = Random(seed)
    for _ in range(40):
        document, search = random_document(random), random_search(random)
        if any(document[name] is None for name in ("at", "sold", "price", "area", "lat", "lon")):
            continue  # the type of a null is not known
        assert hw.why(search.text, document, text=TEXTS, places=PLACES).holds == search.holds(document), search.text


def highlighted(text: str, document: dict[str, Any], language: str | None = None) -> list[str]:
    fields = SearchFields.of(pa.Table.from_pylist([document]).schema, list(document))
    analyzer = Analyzer(language)
    highlighter = Highlighter(fields, analyzer)
    found = highlighter.of(highlighter.words(document), parse_search(text, fields, analyzer))
    return [document[each["field"]][each["start"] : each["end"]] for each in found]


def test_highlights_are_the_words_that_were_found() -> None:
    document = {"title": "Rote Fahrräder und Räder", "body": "Fahrräder: rot, Müde rote Räder"}
    assert highlighted("rote", document) == ["Rote", "rote"]
    assert highlighted("title:fahr*", document) == ["Fahrräder"]
    assert highlighted('"rote räder"', document) == ["rote", "Räder"]
    assert highlighted('title:"fahrräder räder"~1', document) == ["Fahrräder", "Räder"]
    assert highlighted("räder~0 -rot", document) == ["Räder", "Räder"]
    assert [word.lower() for word in highlighted("müde OR und", document)] == [
        word for word in words(" ".join(document.values())) if word in ("müde", "und")
    ]


def test_highlights_of_stems_are_the_words_as_they_are_written() -> None:
    pytest.importorskip("tantivy")
    assert highlighted("house AND walking", {"title": "Houses for a walk"}, "english") == ["Houses", "walk"]
