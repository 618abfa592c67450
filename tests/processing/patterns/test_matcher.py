"""The matcher against brute force: which rows match as which variables, whatever the pattern and however much is known."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from headwater.processing.patterns.automaton import Automaton, automaton_of
from headwater.processing.patterns.grammar import parse_pattern
from headwater.processing.patterns.matcher import find_matches
from headwater.processing.patterns.outcome import Matches, Rule, SearchRows
from tests.processing.patterns.brute_force import Here, Search, matches_of, text_of
from tests.processing.patterns.random_patterns import NAMES, random_part

SEEDS = [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 600))]
BENCH = [pytest.param(seed, marks=pytest.mark.bench) for seed in range(600, 3000)]


def random_rows(random: Random) -> list[dict[str, Any]]:
    at, rows = 0, []
    for number in range(random.choice([1, 3, 8, 14])):
        at += random.choice([0, 1, 1, 2, 5])
        rows.append({"at": at, "row": number, **{name: random.random() < 0.55 for name in NAMES}})
    return rows


def random_search(random: Random) -> Search:
    define = {name: (lambda here, name=name: here.last(name)) for name in NAMES if random.random() < 0.9}
    skip = random.choice([("past", ()), ("past", ()), ("next", ())])
    return Search(random_part(random), define, random.choice([None, None, 2, 6]), skip)


def automaton(search: Search) -> Automaton:
    return automaton_of(parse_pattern(f"ORDER BY at PATTERN ({text_of(search.pattern)})").pattern)


def found(search: Search, partitions: list[list[dict[str, Any]]], until: int | None = None, **more: Any) -> Any:
    """The matches as brute force gives them, each with the time at which it was decided."""
    made = automaton(search)
    rows = [row for partition in partitions for row in partition]
    holds = np.array([[name not in search.define or row[name] for name in made.variables] for row in rows], bool)
    key = np.r_[0, np.cumsum([len(each) for each in partitions])]
    data = SearchRows(
        holds.reshape(len(rows), len(made.variables)), np.array([row["at"] for row in rows], np.int64), key, key[:-1],
        np.ones(len(partitions), bool), until if until is not None else 2**63 - 1, until is None,
    )  # fmt: skip
    rule = Rule(search.within, skip=search.skip[0], **more)  # type: ignore[arg-type]
    return _paths(made, find_matches(made, rule, data), key)


def _paths(made: Automaton, matches: Matches, key: Any) -> list[list[tuple[Any, int]]]:
    given = [list[tuple[Any, int]]() for _ in key[1:]]
    for number, start in enumerate(matches.start.tolist()):
        partition = int(np.searchsorted(key, start, "right")) - 1
        steps = slice(int(matches.offset[number]), int(matches.offset[number + 1]))
        path = tuple(
            (row - int(key[partition]), made.variables[made.position[at]], made.is_hidden[at])
            for row, at in zip(matches.path[steps].tolist(), matches.position[steps].tolist(), strict=True)
        )
        given[partition].append((path or (start - int(key[partition]),), int(matches.decided[number])))
    return given


@pytest.mark.parametrize("seed", [*SEEDS, *BENCH])
def test_matches_are_those_of_brute_force(seed: int) -> None:
    """All constructs, with WITHIN and both ways to go on; several keys at once."""
    random = Random(seed)
    search, partitions = random_search(random), [random_rows(random) for _ in range(random.choice([1, 4, 20]))]
    if not automaton(search).position:
        return
    wanted = [matches_of(search, rows) for rows in partitions]
    assert [[path for path, _ in each] for each in found(search, partitions)] == wanted, text_of(search.pattern)


@pytest.mark.parametrize("seed", [*SEEDS, *BENCH])
def test_a_match_is_given_as_soon_as_it_is_certain(seed: int) -> None:
    """At every watermark the matches are those that all continuations share; the time of decision is the least such watermark."""
    random = Random(seed)
    search, rows = random_search(random), random_rows(random)
    search = search._replace(pattern=random_part(random, anchors=False))
    if not automaton(search).position:
        return
    last = rows[-1]["at"]
    for until in range(last + 1):
        known = [row for row in rows if row["at"] <= until]
        if known:
            given = found(search, [known], until)[0]
            assert all(decided <= until for _, decided in given)
            whole = found(search, [rows])[0]
            assert given == [(path, decided) for path, decided in whole if decided <= until], text_of(search.pattern)


def test_a_condition_sees_the_row_that_it_is_about() -> None:
    """The oracle itself: V-shapes of prices."""
    prices = [5, 4, 3, 4, 5, 1, 2]
    rows = [{"at": number, "price": price} for number, price in enumerate(prices)]

    def falls(here: Here) -> bool:
        before = here.last("price", by=-1)
        return before is not None and here.last("price") < before

    def rises(here: Here) -> bool:
        before = here.last("price", by=-1)
        return before is not None and here.last("price") > before

    pattern = ("seq", [("var", "s"), ("rep", ("var", "d"), 1, None, True), ("rep", ("var", "u"), 1, None, True)])
    found = matches_of(Search(pattern, {"d": falls, "u": rises}), rows)
    assert found == [tuple((row, name, False) for row, name in enumerate("sdduu"))]
