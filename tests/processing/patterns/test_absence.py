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
