"""Absence: what has not come within the time, at the end of a pattern and between steps."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from headwater.model.errors import InvalidInput
from tests.processing.patterns.test_detect import SCHEMA, SECOND, by_key, random_rows
from tests.rigs.processing.operator_runs import cut, in_time, run_batches, seeds, shuffled
from tests.rigs.processing.pattern_runs import Pattern

UNPAID = """PARTITION BY k ORDER BY at, n MEASURES o.n AS m, COUNT(*) AS rows AFTER MATCH SKIP TO NEXT ROW
    PATTERN (o ABSENT(p)) WITHIN INTERVAL '6' SECOND DEFINE o AS x >= 4, p AS x < 2"""
BETWEEN = """PARTITION BY k ORDER BY at, n MEASURES o.n AS m, q.n AS q AFTER MATCH SKIP TO NEXT ROW
    PATTERN (o ABSENT(p) q) WITHIN INTERVAL '6' SECOND DEFINE o AS x >= 4, p AS x < 2, q AS x = 3"""


def unpaid(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Each order that no payment follows in its time; it is given when the time is over."""
    found = list[tuple[Any, ...]]()
    for place, row in enumerate(rows):
        later = [r for r in rows[place + 1 :] if r["at"] <= row["at"] + 6 * SECOND]
        if (row["x"] or 0) >= 4 and not any(r["x"] is not None and r["x"] < 2 for r in later):
            found.append((row["n"], 1, row["at"] + 6 * SECOND))
    return found


def between(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Each order that a row with 3 follows in its time, before any payment."""
    found = list[tuple[Any, ...]]()
    for place, row in enumerate(rows):
        later = [r for r in rows[place + 1 :] if r["at"] <= row["at"] + 6 * SECOND]
        end = next((r for r in later if r["x"] == 3 or (r["x"] is not None and r["x"] < 2)), None)
        if (row["x"] or 0) >= 4 and end is not None and end["x"] == 3:
            found.append((row["n"], end["n"], end["at"]))
    return found


UNANSWERED = """PARTITION BY k ORDER BY at, n MEASURES o.n AS m, COUNT(*) AS rows, p.n AS p AFTER MATCH SKIP TO NEXT ROW
    PATTERN (o other*? p) WITHIN INTERVAL '6' SECOND DEFINE o AS x >= 4, p AS x < 2"""
PAST_LAST = """PARTITION BY k ORDER BY at, n MEASURES FIRST(o.n) AS m, COUNT(*) AS rows, p.n AS p
    PATTERN (o{2} p) WITHIN INTERVAL '6' SECOND DEFINE o AS x >= 4, p AS x < 2"""


def answered(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Each order with its payment, or with all rows of its time where none comes."""
    found = list[tuple[Any, ...]]()
    for place, row in enumerate(rows):
        later = [r for r in rows[place + 1 :] if r["at"] <= row["at"] + 6 * SECOND]
        paid = next((r for r in later if r["x"] is not None and r["x"] < 2), None)
        if (row["x"] or 0) >= 4 and paid is None:
            found.append((row["n"], 1 + len(later), None, True, row["at"] + 6 * SECOND))
        elif (row["x"] or 0) >= 4 and paid is not None:
            found.append((row["n"], 2 + later.index(paid), paid["n"], False, paid["at"]))
    return found


def twice(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Two orders and a payment, row after row; or what there was of them at the end of the time."""
    found, place = list[tuple[Any, ...]](), 0
    while place < len(rows):
        first = rows[place]
        window = [r for r in rows[place : place + 3] if r["at"] <= first["at"] + 6 * SECOND]
        fits = [(r["x"] or 0) >= 4 if at < 2 else r["x"] is not None and r["x"] < 2 for at, r in enumerate(window)]
        if all(fits) and len(window) == 3:
            found.append((first["n"], 3, window[2]["n"], False, window[2]["at"]))
            place += 2
        elif all(fits):
            found.append((first["n"], len(window), None, True, first["at"] + 6 * SECOND))
        place += 1
    return found


@pytest.mark.parametrize("seed", seeds(30))
@pytest.mark.parametrize(("text", "wanted"), [(UNANSWERED, answered), (PAST_LAST, twice)])
def test_what_was_open_when_its_time_was_over_is_given(tmp_path: Path, seed: int, text: str, wanted: Any) -> None:
    """With `timeouts=True`, and a column that says so."""
    random, pattern = Random(seed), Pattern(text, SCHEMA, timeouts=True)
    lateness = random.choice([0, 5]) * SECOND
    rows = shuffled(random, random_rows(random), at="at", lateness_us=lateness)
    batches, watermarks = cut(random, rows, SCHEMA, ["k"], at="at", lateness_us=lateness)
    given = pattern.measured(run_batches(pattern.operator, random, tmp_path, batches, watermarks))
    kept = by_key(in_time(rows, batches, watermarks, at="at"))
    names = ["k", *pattern.formulas.measures, "timed_out"]
    found = [(*(row[name] for name in names), round(row["matched_at"].timestamp() * SECOND)) for row in given]
    expected = [(key, *each) for key, part in kept.items() for each in wanted(part)]
    assert sorted(found, key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize("seed", seeds(30))
@pytest.mark.parametrize(("text", "wanted"), [(UNPAID, unpaid), (BETWEEN, between)])
def test_absence_is_that_of_brute_force(tmp_path: Path, seed: int, text: str, wanted: Any) -> None:
    """However rows come; the result's time is that at which the absence was certain."""
    random, pattern = Random(seed), Pattern(text, SCHEMA)
    lateness = random.choice([0, 5]) * SECOND
    rows = shuffled(random, random_rows(random), at="at", lateness_us=lateness)
    batches, watermarks = cut(random, rows, SCHEMA, ["k"], at="at", lateness_us=lateness)
    given = pattern.measured(run_batches(pattern.operator, random, tmp_path, batches, watermarks))
    kept = by_key(in_time(rows, batches, watermarks, at="at"))
    names = ["k", *pattern.formulas.measures]
    found = [(*(row[name] for name in names), round(row["matched_at"].timestamp() * SECOND)) for row in given]
    assert sorted(found) == sorted((key, *each) for key, part in kept.items() for each in wanted(part))


def test_an_absence_that_nothing_ends_is_refused() -> None:
    """Without WITHIN one would wait for ever."""
    with pytest.raises(InvalidInput, match="needs WITHIN"):
        Pattern("ORDER BY at PATTERN (o ABSENT(p)) DEFINE p AS x < 2", SCHEMA)
