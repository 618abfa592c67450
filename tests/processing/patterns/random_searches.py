"""Random row patterns with all clauses, as text and for brute force, and what brute force gives for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from tests.processing.patterns.brute_force import Here, Row, Search, matches_of, text_of
from tests.processing.patterns.random_patterns import NAMES, random_part

Value = Callable[[Here], Any]


def above(number: int) -> tuple[str, Value]:
    return f"x > {number}", lambda here: _compared(here.last("x"), number, ">")


def _compared(left: Any, right: Any, sign: str) -> bool | None:
    if left is None or right is None:
        return None
    return bool(left > right) if sign == ">" else bool(left < right)


OF_ROWS: Sequence[tuple[str, Value]] = (
    above(2),
    above(4),
    ("x < 4", lambda here: _compared(here.last("x"), 4, "<")),
    ("x > PREV(x)", lambda here: _compared(here.last("x"), here.last("x", by=-1), ">")),
    ("PREV(x, 2) < 5 OR x = 3", lambda here: _either(_compared(here.last("x", by=-2), 5, "<"), here.last("x") == 3)),
    ("NEXT(x) > x", lambda here: _compared(here.last("x", by=1), here.last("x"), ">")),
    ("x IS NULL", lambda here: here.last("x") is None),
    ("TRUE", lambda here: True),
)


OF_MATCHES: Sequence[tuple[str, Value]] = (
    *OF_ROWS,
    ("x > LAST(x, 1)", lambda here: _compared(here.last("x"), here.last("x", None, 1), ">")),
    (
        "x > FIRST(x) OR n = FIRST(n)",
        lambda here: _either(_compared(here.last("x"), here.first("x"), ">"), len(here.path) == 1),
    ),
    ("x < LAST(a.x)", lambda here: _compared(here.last("x"), here.last("x", ["a"]), "<")),
    ("COUNT(b.x) < 2", lambda here: len(_all(here, "x", ["b"])) < 2),
    ("SUM(x) < 12", lambda here: _compared(sum(_all(here, "x", None)) if _all(here, "x", None) else None, 12, "<")),
    ("AVG(a.x) < x + 1", lambda here: _compared(_mean(_all(here, "x", ["a"])), _plus(here.last("x"), 1), "<")),
    ("COUNT(DISTINCT x) < 3", lambda here: len(set(_all(here, "x", None))) < 3),
    ("MAX(u.x) > x", lambda here: _compared(max(_all(here, "x", ["a", "b"]), default=None), here.last("x"), ">")),
    ("PREV(LAST(b.x)) > 1", lambda here: _compared(here.last("x", ["b"], by=-1), 1, ">")),
    (
        "FIRST(u.x, 1) > 1 OR COUNT(*) < 3",
        lambda here: _either(_compared(here.first("x", ["a", "b"], 1), 1, ">"), len(here.path) < 3),
    ),
    ("LAST(CLASSIFIER(), 1) = 'a' OR COUNT(*) < 2", lambda here: len(here.path) < 2 or here.path[-2][1] == "a"),
)


def _mean(values: list[Any]) -> float | None:
    return sum(values) / len(values) if values else None


def _plus(value: Any, more: int) -> Any:
    return None if value is None else value + more


def _either(left: bool | None, right: bool) -> bool | None:
    return True if left or right else left


def _all(here: Here, column: str, variables: Sequence[str] | None, *, final: bool = False) -> list[Any]:
    found = [here.rows[row][column] for row in here.of(variables, final=final)]
    return [value for value in found if value is not None]


def _named(here: Here, *, first: bool = False) -> str | None:
    return None if not here.path else here.path[0 if first else -1][1]


MEASURES: Sequence[tuple[str, Value]] = (
    ("a.x", lambda here: here.last("x", ["a"])),
    ("FIRST(b.x)", lambda here: here.first("x", ["b"])),
    ("LAST(x, 1)", lambda here: here.last("x", None, 1)),
    ("FIRST(u.n, 1)", lambda here: here.first("n", ["a", "b"], 1)),
    ("FINAL LAST(x)", lambda here: here.last("x", final=True)),
    ("PREV(FIRST(n))", lambda here: here.first("n", by=-1)),
    ("NEXT(LAST(b.n), 2)", lambda here: here.last("n", ["b"], by=2)),
    ("PREV(n, 3)", lambda here: here.last("n", by=-3)),
    ("CLASSIFIER()", _named),
    ("FIRST(CLASSIFIER())", lambda here: _named(here, first=True)),
    ("MATCH_NUMBER()", lambda here: here.number),
    ("COUNT(*)", lambda here: len(here.path)),
    ("FINAL COUNT(u.*)", lambda here: len(here.of(["a", "b"], final=True))),
    ("SUM(x)", lambda here: sum(_all(here, "x", None)) if _all(here, "x", None) else None),
    ("MIN(b.x)", lambda here: min(_all(here, "x", ["b"]), default=None)),
    (
        "MAX(x + n)",
        lambda here: max(
            (r["x"] + r["n"] for r in (here.rows[i] for i in here.of(None)) if r["x"] is not None), default=None
        ),
    ),
    ("COUNT(DISTINCT a.x)", lambda here: len(set(_all(here, "x", ["a"])))),
    (
        "FINAL SUM(a.x)",
        lambda here: sum(_all(here, "x", ["a"], final=True)) if _all(here, "x", ["a"], final=True) else None,
    ),
)


SKIPS = {
    skip: f"AFTER MATCH SKIP TO {row}" for skip, row in (("next", "NEXT ROW"), ("first", "FIRST d"), ("last", "d"))
}


class Clauses(NamedTuple):
    """A search with everything around it."""

    text: str
    search: Search
    measures: Sequence[Value]
    all_rows: str
    """Nothing, or what follows ALL ROWS PER MATCH."""


def random_clauses(
    random: Random, conditions: Sequence[tuple[str, Value]] = OF_ROWS, *, anchors: bool = True
) -> Clauses:
    """All clauses by random."""
    part, skip = random_part(random, anchors=anchors), random.choice(["past", "past", "next", "first", "last"])
    if skip in SKIPS and skip != "next":
        part = ("seq", [("var", "c"), part, ("var", "d")])
    names = _names(part)
    usable = [each for each in conditions if _is_of(each[0], names)]
    chosen = {name: random.choice(usable) for name in names if random.random() < 0.9}
    within = random.choice([None, 3, 10])
    if "$" in text_of(part):  # refused on streams: when the time of a start is over, its partition may still get rows
        within = None
    measures = [each for each in random.sample(MEASURES, 4) if _is_of(each[0], names)]
    rows = random.choice(["", "", "SHOW EMPTY MATCHES", "OMIT EMPTY MATCHES", "WITH UNMATCHED ROWS"])
    if rows == "WITH UNMATCHED ROWS" and "{-" in text_of(part):
        rows = ""
    subset = [name for name in ("a", "b") if name in names]
    lines = [
        "PARTITION BY k ORDER BY at, n",
        f"MEASURES {', '.join(f'{sql} AS m{number}' for number, (sql, _) in enumerate(measures))}" if measures else "",
        f"ALL ROWS PER MATCH {rows}" if rows else random.choice(["", "ONE ROW PER MATCH"]),
        SKIPS.get(skip, ""),
        f"PATTERN ({text_of(part)})",
        f"WITHIN INTERVAL '{within}' SECOND" if within is not None else "",
        f"SUBSET u = ({', '.join(subset)})" if subset else "",
        f"DEFINE {', '.join(f'{name} AS {sql}' for name, (sql, _) in chosen.items())}" if chosen else "",
    ]
    define = {name: value for name, (_, value) in chosen.items()}
    span = None if within is None else within * 1_000_000
    search = Search(part, define, span, (skip, ("d",)))
    return Clauses("\n".join(line for line in lines if line), search, [value for _, value in measures], rows)


def _names(part: Any) -> list[str]:
    text = text_of(part).replace("PERMUTE", "")
    return [name for name in NAMES if name in text]


def _is_of(sql: str, names: list[str]) -> bool:
    needs = {"a": "a." in sql, "b": "b." in sql}
    if "u." in sql:
        return "a" in names or "b" in names
    return all(name in names for name, is_needed in needs.items() if is_needed)


def answer(clauses: Clauses, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """What the clauses give for one partition: for ONE ROW the measures, for ALL ROWS after the row's number."""
    found, used = list[tuple[Any, ...]](), set[int]()
    for number, path in enumerate(matches_of(clauses.search, rows), 1):
        is_empty = isinstance(path[0], int)
        whole: Any = () if is_empty else path
        used |= {path[0]} if is_empty else {row for row, *_ in whole}
        if not clauses.all_rows:
            found.append(_measured(clauses, Here(rows, whole, number, whole)))
        elif is_empty and clauses.all_rows != "OMIT EMPTY MATCHES":
            found.append((rows[path[0]]["n"], *_measured(clauses, Here(rows, (), number, ()))))
        elif not is_empty:
            for length, (row, _, is_out) in enumerate(whole, 1):
                if not is_out:
                    here = Here(rows, whole[:length], number, whole)
                    found.append((rows[row]["n"], *_measured(clauses, here)))
    if clauses.all_rows == "WITH UNMATCHED ROWS":
        alone = (row["n"] for number, row in enumerate(rows) if number not in used)
        found += [(n, *(None for _ in clauses.measures)) for n in alone]
    return found


def _measured(clauses: Clauses, here: Here) -> tuple[Any, ...]:
    return tuple(value(here) for value in clauses.measures)
