"""The language of searches: what a text says, and where it says nothing."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.model.errors import InvalidInput
from headwater.processing.search.analysis import Analyzer, words_of
from headwater.processing.search.fields import HIGHEST, SearchFields
from headwater.processing.search.grammar import parse_search
from headwater.processing.search.query import (
    Box,
    Circle,
    Clauses,
    Everything,
    Filled,
    Fuzzy,
    Phrase,
    Prefix,
    Query,
    Stretch,
    Wildcard,
    Word,
    WordRange,
    decoded,
    encoded,
)

SCHEMA = pa.schema(
    [
        ("title", pa.string()), ("body", pa.string()), ("category", pa.string()), ("price", pa.int64()),
        ("area", pa.float64()), ("tax", pa.decimal128(9, 2)), ("sold", pa.bool_()), ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")), ("lat", pa.float64()), ("lon", pa.float64()),
    ]
)  # fmt: skip
FIELDS = SearchFields.of(SCHEMA, ["title", "body"], {"home": ("lat", "lon")})
DAY = 86_400_000_000
A, B, C = Word("", "a"), Word("", "b"), Word("", "c")


def parsed(text: str, language: str | None = None) -> Query:
    return parse_search(text, FIELDS, Analyzer(language))


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Word", Word("", "word")),
        ("title:word", Word("title", "word")),
        ('"red  Bicycle"', Phrase("", ("red", "bicycle"), (0, 1))),
        ('title:"red bicycle"~3', Phrase("title", ("red", "bicycle"), (0, 1), 3)),
        ("wi-fi", Phrase("", ("wi", "fi"), (0, 1))),
        ("Wor*", Prefix("", "wor")),
        ("w?r*d", Wildcard("", ("w", 1, "r", 0, "d"))),
        ("*ord", Wildcard("", (0, "ord"))),
        ("word~1", Fuzzy("", "word", 1)),
        ("word~", Fuzzy("", "word", 2)),
        ("title:[a TO b}", WordRange("title", "a", "b", True, False)),
        ('category:"New York"', Word("category", "New York")),
        ("category:New*", Prefix("category", "New")),
        ("price:5", Stretch("price", 5, 5)),
        ("price:-5", Stretch("price", -5, -5)),
        ("price:>=5", Stretch("price", 5, HIGHEST)),
        ("price:>-5", Stretch("price", -4, HIGHEST)),
        ("price:<5", Stretch("price", -HIGHEST, 4)),
        ("price:[1 TO 7}", Stretch("price", 1, 6)),
        ("price:{1.5 TO 2.5}", Stretch("price", 2, 2)),
        ("price:1.5", Stretch("price", 2, 1)),
        ("tax:[1.005 TO 2]", Stretch("tax", 101, 200)),
        ("sold:true", Stretch("sold", 1, 1)),
        ("day:1970-01-02", Stretch("day", DAY, 2 * DAY - 1)),
        ("at:{1970-01-01 TO 1970-01-03]", Stretch("at", DAY, 3 * DAY - 1)),
        ('at:"1970-01-01T00:00:01Z"', Stretch("at", 1_000_000, 1_000_000)),
        ("home:near(52.5, -13.4, 5km)", Circle("home", 52.5, -13.4, 5_000)),
        ("home:box(1, 170, 3, -170)", Box("home", 1, 170, 3, -170)),
        ("title:*", Filled("title")),
        ("_exists_:price", Filled("price")),
        ("price:[* TO *]", Filled("price")),
        ("*:*", Everything()),
        ("a^2", A),
        ("a\\:b", Phrase("", ("a", "b"), (0, 1))),
        ('"AND"', Word("", "and")),
    ],
)
def test_a_term(text: str, query: Query) -> None:
    assert parsed(text) == query
    assert decoded(encoded(query)) == query


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("a b", Clauses(should=(A, B))),
        ("a OR b || c", Clauses(should=(A, B, C))),
        ("a AND b", Clauses(must=(A, B))),
        ("a AND b OR c", Clauses(must=(A, B), should=(C,))),
        ("a OR b AND c", Clauses(must=(B, C), should=(A,))),
        ("a b AND c", Clauses(must=(B, C), should=(A,))),
        ("a AND NOT b", Clauses(must=(A,), must_not=(B,))),
        ("+a b -c", Clauses(must=(A,), should=(B,), must_not=(C,))),
        ("-a AND b", Clauses(must=(B,), must_not=(A,))),
        ("a !b", Clauses(should=(A,), must_not=(B,))),
        ("(a)", A),
        ("a AND (b OR c)", Clauses(must=(A, Clauses(should=(B, C))))),
        ("title:(a b)", Clauses(should=(Word("title", "a"), Word("title", "b")))),
    ],
)
def test_clauses_are_joined_as_by_lucenes_classic_parser(text: str, query: Query) -> None:
    """AND makes its neighbours required, OR changes nothing, and + and - say it of one clause."""
    assert parsed(text) == query


@pytest.mark.parametrize(
    ("text", "character", "what"),
    [
        ("", 1, "empty"), ("  ", 1, "empty"), ('a "b', 3, "quotation mark"), ("a [1 TO", 3, "no end"), ("(a", 1, "without its )"),
        ("a)", 2, "without its ("), ("a ()", 3, "empty"), ("*", 1, "alone"), ("a AND *", 7, "alone"), ("NOT a", 1, "must not hold"),
        ("a (-b)", 4, "must not hold"), ("a AND", 3, "nothing after"), ("OR a", 1, "nothing before"), ("a AND OR b", 7, "missing"),
        ("a -", 3, "belongs to"), ("a ~2", 3, "belongs to"), ("a~3", 2, "edits"), ("wor*~1", 5, "cannot be fuzzy"),
        ("street:a", 1, "no field"), ("price:much", 7, "not a number"), ("price:nan", 7, "not a number"),
        ("sold:maybe", 6, "not a value"), ("day:31.1.2026", 5, "not a time"), ("home:5", 6, "is a place"),
        ("home:near(95, 3, 5km)", 6, "beyond 90"), ("home:box(1, 2, 3, 190)", 6, "beyond 180"),
        ("home:near(nan, 3, 5km)", 6, "beyond 90"), ("home:near(5, 3, 50000km)", 6, "not a distance"),
        ("home:box(3, 1, 1, 2)", 6, "begins north"), ("home:near(5, 3)", 6, "needs a latitude"), ("*?", 1, "says nothing"),
        ("a\\", 2, "nothing after"), ("price:[1 2]", 7, "not a range"), ("price:>", 7, "no value"), ("price:5~1", 8, "not a text"),
        (" ".join(["word"] * 10_000), 5121, "1,024 clauses"), ("(" * 60 + "a" + ")" * 60, 51, "nested"), ("-- a", 2, "belongs to"),
    ],
)  # fmt: skip
def test_what_says_nothing_is_refused_with_its_place(text: str, character: int, what: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parsed(text)
    assert what in refused.value.what
    assert f"(character {character}: " in refused.value.what
    assert refused.value.advice


def test_a_search_of_a_megabyte_is_refused() -> None:
    with pytest.raises(InvalidInput, match="too long"):
        parsed("a" * 1_000_000)


def test_stop_words_leave_gaps_and_words_are_stems() -> None:
    pytest.importorskip("tantivy")
    assert parsed('"State of the Arts"', "english") == Phrase("", ("state", "art"), (0, 3))
    assert parsed("the houses", "english") == Word("", "hous")
    assert parsed("houses*", "english") == Prefix("", "houses")
    with pytest.raises(InvalidInput, match="left out"):
        parsed("the", "english")


def test_a_language_without_stems_is_refused() -> None:
    with pytest.raises(InvalidInput, match="klingon"):
        Analyzer("klingon")


def test_words_are_runs_of_letters_marks_and_digits() -> None:
    assert words_of("Müller's Wi-Fi, 2×3 Straße_9 ДОМ") == ["müller", "s", "wi", "fi", "2", "3", "straße", "9", "дом"]
    assert words_of("हिन्दी भाषा") == ["हिन्दी", "भाषा"]
