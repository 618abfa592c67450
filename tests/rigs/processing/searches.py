"""Random searches and documents, and which match, decided in plain Python: each search is a text and its own condition."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa

Document = dict[str, Any]
START = datetime(2026, 1, 31, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("title", pa.string()), ("body", pa.string()), ("category", pa.string()), ("price", pa.int64()),
        ("area", pa.float64()), ("sold", pa.bool_()), ("at", pa.timestamp("us", "UTC")), ("lat", pa.float64()),
        ("lon", pa.float64()),
    ]
)  # fmt: skip
TEXTS = ["title", "body"]
PLACES = {"home": ("lat", "lon")}
WORDS = [
    "ab",
    "abc",
    "abcd",
    "abd",
    "acb",
    "ba",
    "bac",
    "bca",
    "cab",
    "cabd",
    "dab",
    "dabc",
    "müde",
    "mud",
    "mude",
    "x1",
    "x12",
]
NAMES = ["c1", "c2", "New York", "new york", ""]


class RandomSearch(NamedTuple):
    """A search as a text, and what it says."""

    text: str
    holds: Callable[[Document], bool]


def random_document(random: Random) -> Document:
    def text() -> str | None:
        if random.random() < 0.08:
            return None
        words = [random.choice(WORDS) for _ in range(random.randint(0, 12))]
        return random.choice([" ", ", ", "-"]).join(word.title() if random.random() < 0.2 else word for word in words)

    def some(value: Any) -> Any:
        return None if random.random() < 0.15 else value

    lat, lon = random.choice(
        [(random.uniform(-90, 90), random.uniform(-180, 180)), near_berlin(random), (89.9, 170.0), (0.0, 180.0)]
    )
    return {
        "title": text(), "body": text(), "category": some(random.choice(NAMES)), "price": some(random.randint(-3, 20)),
        "area": some(random.choice([math.nan, -0.0, 0.0, 1e300, random.randint(0, 40) / 4])), "sold": some(random.random() < 0.5),
        "at": some(START + timedelta(hours=random.randint(-60, 60))), "lat": some(lat), "lon": some(lon),
    }  # fmt: skip


def near_berlin(random: Random) -> tuple[float, float]:
    return 52.5 + random.gauss(0, 0.3), 13.4 + random.gauss(0, 0.5)


def random_search(random: Random, depth: int = 0) -> RandomSearch:
    """A search of any construct of the language."""
    if depth < 3 and random.random() < (0.6 if depth == 0 else 0.3):
        return _group(random, depth)
    return random.choice(_TERMS)(random)


def _group(random: Random, depth: int) -> RandomSearch:
    parts = [random_search(random, depth + 1) for _ in range(random.randint(1, 4))]
    signs = [random.choice(["", "", "+", "+", "-"]) for _ in parts]
    if all(sign == "-" for sign in signs):
        signs[0] = "+"
    text = " ".join(f"{sign}({part.text})" for sign, part in zip(signs, parts, strict=True))
    must, should, must_not = (
        [part.holds for part, sign in zip(parts, signs, strict=True) if sign == each] for each in ("+", "", "-")
    )

    def holds(document: Document) -> bool:
        if any(part(document) for part in must_not) or not all(part(document) for part in must):
            return False
        return bool(must) or any(part(document) for part in should)

    return RandomSearch(text, holds)


def words(text: str | None) -> list[str]:
    """The words of a text, sign by sign."""
    signs = (sign if unicodedata.category(sign)[0] in "LMN" else " " for sign in (text or "").lower())
    return "".join(signs).split()


def _field(random: Random) -> tuple[str, Callable[[Document], list[list[str]]]]:
    field = random.choice(["", "", "title", "body", "category"])
    if field == "category":
        return "category:", lambda document: [[document["category"]]] if document["category"] is not None else []
    fields = [field] if field else TEXTS
    return f"{field}:" if field else "", lambda document: [words(document[each]) for each in fields]


def _any_word(random: Random, text: Callable[[str], str], test: Callable[[str, str], bool]) -> RandomSearch:
    field, given = _field(random)
    word = random.choice(WORDS) if field != "category:" else random.choice(["c1", "c2", "c"])
    written = word.upper() if field != "category:" and random.random() < 0.2 else word
    return RandomSearch(
        field + text(written), lambda document: any(test(each, word) for some in given(document) for each in some)
    )


def _word(random: Random) -> RandomSearch:
    return _any_word(random, str, lambda each, word: each == word)


def _prefix(random: Random) -> RandomSearch:
    return _any_word(random, lambda word: f"{word[:2]}*", lambda each, word: each.startswith(word[:2]))


def _fuzzy(random: Random) -> RandomSearch:
    edits = random.randint(0, 2)
    return _any_word(random, lambda word: f"{word}~{edits}", lambda each, word: edits_between(each, word) <= edits)


def _wildcard(random: Random) -> RandomSearch:
    shape = random.choice(["?{}", "*{}", "{}?", "*{}*", "{}*{}", "?{}*"])
    pattern = lambda word: shape.format(word[:1], word[-1:])  # noqa: E731
    regex = lambda word: re.escape(pattern(word)).replace(r"\?", ".").replace(r"\*", ".*")  # noqa: E731
    return _any_word(random, pattern, lambda each, word: re.fullmatch(regex(word), each, re.DOTALL) is not None)


def _word_range(random: Random) -> RandomSearch:
    low, high = sorted(random.sample(WORDS, 2))
    opening, closing = random.choice("[{"), random.choice("]}")

    def test(each: str, word: str) -> bool:
        return (low < each or (opening == "[" and low == each)) and (each < high or (closing == "]" and each == high))

    return _any_word(random, lambda word: f"{opening}{low} TO {high}{closing}", test)


def _phrase(random: Random) -> RandomSearch:
    field = random.choice(["", "title"])
    wanted = [random.choice(WORDS[:8]) for _ in range(random.randint(2, 4))]
    slop = random.choice([0, 0, 1, 2, 4])
    fields = [field] if field else TEXTS
    text = f'{field}{":" if field else ""}"{" ".join(wanted)}"' + (f"~{slop}" if slop else "")
    return RandomSearch(text, lambda document: any(is_near(words(document[each]), wanted, slop) for each in fields))


def is_near(given: list[str], wanted: list[str], slop: int) -> bool:
    """Whether words lie near each other, by trying all their places."""

    def tried(number: int, taken: tuple[int, ...]) -> bool:
        moved = [place - at for at, place in enumerate(taken)]
        if moved and max(moved) - min(moved) > slop:
            return False
        if number == len(wanted):
            return True
        return any(
            tried(number + 1, (*taken, place))
            for place, word in enumerate(given)
            if word == wanted[number] and place not in taken
        )

    return tried(0, ())


def edits_between(first: str, second: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours, each sign once."""
    rows = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i in range(len(first) + 1):
        for j in range(len(second) + 1):
            if not i or not j:
                rows[i][j] = i + j
                continue
            rows[i][j] = min(
                rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (first[i - 1] != second[j - 1])
            )
            if i > 1 and j > 1 and first[i - 1] == second[j - 2] and first[i - 2] == second[j - 1]:
                rows[i][j] = min(rows[i][j], rows[i - 2][j - 2] + 1)
    return rows[-1][-1]


def _number(random: Random) -> RandomSearch:
    field = random.choice(["price", "area"])
    low, high = sorted((random.randint(-3, 12), random.randint(-3, 12)))
    opening, closing = random.choice("[{"), random.choice("]}")
    shape = random.choice(["range", "range", ">=", "<", "from", "is"])
    text = {
        "range": f"{opening}{low} TO {high}{closing}", ">=": f">={low}", "<": f"<{high}", "from": f"{opening}{low} TO *]",
        "is": f"{low}",
    }[shape]  # fmt: skip

    def holds(document: Document) -> bool:
        value = document[field]
        if value is None or math.isnan(value):
            return False
        above = value >= low if opening == "[" else value > low
        below = value <= high if closing == "]" else value < high
        return {"range": above and below, ">=": value >= low, "<": value < high, "from": above, "is": value == low}[
            shape
        ]

    return RandomSearch(f"{field}:{text}", holds)


def _day(random: Random) -> RandomSearch:
    first, last = sorted(random.randint(-2, 2) for _ in range(2))
    low, high = START + timedelta(days=first), START + timedelta(days=last + 1)
    text = f"at:[{low.date()} TO {(high - timedelta(days=1)).date()}]"
    return RandomSearch(text, lambda document: document["at"] is not None and low <= document["at"] < high)


def _truth(random: Random) -> RandomSearch:
    wanted = random.random() < 0.5
    return RandomSearch(f"sold:{str(wanted).lower()}", lambda document: document["sold"] is wanted)


def _filled(random: Random) -> RandomSearch:
    field = random.choice(["title", "category", "price", "at"])
    shape = random.choice(["{}:*", "_exists_:{}"])
    test = (lambda value: bool(words(value))) if field == "title" else (lambda value: value is not None)
    return RandomSearch(shape.format(field), lambda document: test(document[field]))


def _circle(random: Random) -> RandomSearch:
    lat, lon = random.choice(
        [near_berlin(random), (random.uniform(-90, 90), random.uniform(-180, 180)), (89.5, 0.0), (0.0, -179.9)]
    )
    kilometres = random.choice([5, 30, 200, 4_000, 15_000])

    def holds(document: Document) -> bool:
        if document["lat"] is None or document["lon"] is None:
            return False
        return _kilometres(lat, lon, document["lat"], document["lon"]) <= kilometres

    return RandomSearch(f"home:near({lat!r}, {lon!r}, {kilometres}km)", holds)


def _kilometres(lat: float, lon: float, to_lat: float, to_lon: float) -> float:
    """The angle between two directions from the middle of the earth."""
    (a, b), (c, d) = ((math.radians(x), math.radians(y)) for x, y in ((lat, lon), (to_lat, to_lon)))
    first = (math.cos(a) * math.cos(b), math.cos(a) * math.sin(b), math.sin(a))
    second = (math.cos(c) * math.cos(d), math.cos(c) * math.sin(d), math.sin(c))
    return 6_371.0088 * 2 * math.asin(min(1.0, math.dist(first, second) / 2))


def _box(random: Random) -> RandomSearch:
    south, north = sorted((random.uniform(-90, 90), random.choice([52.5, 90.0, random.uniform(-90, 90)])))
    west, east = random.uniform(-180, 180), random.choice([13.4, -170.0, random.uniform(-180, 180)])

    def holds(document: Document) -> bool:
        lat, lon = document["lat"], document["lon"]
        if lat is None or lon is None or not south <= lat <= north:
            return False
        return west <= lon <= east if west <= east else (lon >= west or lon <= east)

    return RandomSearch(f"home:box({south!r}, {west!r}, {north!r}, {east!r})", holds)


def _everything(random: Random) -> RandomSearch:
    return RandomSearch("*:*", lambda document: True)


_TERMS = [
    _word, _word, _word, _prefix, _fuzzy, _wildcard, _word_range, _phrase, _phrase, _number, _number, _day, _truth, _filled,
    _circle, _circle, _box, _everything,
]  # fmt: skip
