"""Rules of `hw.detect` against brute force: they change while events flow, in any cut, with batches run again and other partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from headwater.model.clock import NO_TIME
from headwater.processing.patterns.rule_operator import DetectRules
from headwater.processing.patterns.rule_plan import RuleForm, RulePlan, rule_plan
from headwater.processing.patterns.rule_versions import RuleSource
from headwater.processing.state.state import State, StateStore
from tests.processing.patterns.random_searches import OF_MATCHES, Clauses, answer, random_clauses
from tests.processing.patterns.test_detect import SCHEMA, SECOND
from tests.rigs.processing.operator_runs import UTC_US, run_batches, run_each, table_of

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 100))]
BENCH = [pytest.param(seed, marks=pytest.mark.bench) for seed in range(100, 1000)]
MEASURES = pa.schema([(f"m{number}", pa.string()) for number in range(4)])
FORM = RuleForm(SCHEMA, ("k",), "at", MEASURES, 100_000)
OWN = pa.field("owner", pa.string())
RULES = pa.schema([("rule", pa.string()), ("pattern", pa.string()), OWN, ("changed", UTC_US), ("_deleted", pa.bool_())])
BROKEN = (
    "PATTERN (a",
    "PATTERN (a) DEFINE a AS colour = 1",
    "PATTERN (a) DEFINE b AS x > 1",
    "PATTERN (a{2000})",
    None,
)
END = 10**9 * SECOND

Row = dict[str, Any]


class Change(NamedTuple):
    """A version of a rule: its row in the table, and what brute force searches for; None where the rule is parked or removed."""

    row: Row
    clauses: Clauses | None


def operator(ties: str = "table", form: RuleForm = FORM) -> DetectRules:
    return DetectRules(form, RuleSource((OWN,), "changed", ties == "table", True, True), in_log_order=False)


def change(rule: str, at: int, pattern: str | None, *, gone: bool = False, owner: str = "o") -> Row:
    return {"rule": rule, "pattern": pattern, "owner": owner, "changed": at, "_deleted": gone}


def random_change(random: Random, number: int, names: int, times: int) -> Change:
    kind, rule, at = random.random(), f"r{random.randrange(names)}", random.randrange(times) * SECOND
    if kind < 0.15:
        return Change(change(rule, at, None, gone=True), None)
    if kind < 0.3:
        return Change(change(rule, at, random.choice(BROKEN), owner=f"o{number}"), None)
    clauses = random_clauses(random, OF_MATCHES, anchors=False)
    skipped = ("PARTITION BY", "ALL ROWS", "ONE ROW")
    text = "\n".join(line for line in clauses.text.splitlines() if not line.startswith(skipped))
    is_refused = isinstance(rule_plan(text, FORM), str)
    assert not is_refused or "MATCH_NUMBER" in text or "never matches a row" in str(rule_plan(text, FORM)), text
    row = change(rule, at, text, owner=f"o{number}")
    return Change(row, None if is_refused else clauses._replace(all_rows=""))


def random_rows(random: Random, count: int, times: int) -> list[Row]:
    return [
        {"k": random.choice("pqr"), "n": n, "x": random.choice([None, *range(7)]), "at": random.randrange(times) * SECOND}
        for n in range(count)
    ]  # fmt: skip


def by_hand(rows: Sequence[Row], changes: Sequence[Change], *, is_rule_first: bool) -> list[tuple[Any, ...]]:
    """What each version gives over the rows from its time to that of the next."""
    found = list[tuple[Any, ...]]()
    for rule in {each.row["rule"] for each in changes}:
        versions = sorted((each for each in changes if each.row["rule"] == rule), key=lambda each: each.row["changed"])
        ends = [*(each.row["changed"] for each in versions[1:]), END]
        for (row, clauses), end in zip(versions, ends, strict=True):
            if clauses is None:
                continue
            since = row["changed"]
            mine = [r for r in rows if (since <= r["at"] < end if is_rule_first else since < r["at"] <= end)]
            for key in "pqr":
                given = sorted((r for r in mine if r["k"] == key), key=lambda r: (r["at"], r["n"]))
                for measures in answer(clauses, given):
                    texts = [None if value is None else str(value) for value in measures]
                    found.append((rule, row["owner"], key, *texts, *[None] * (4 - len(texts))))
    return found


def batches_of(random: Random, rows: Sequence[Row], changes: Sequence[Row], lateness: int) -> tuple[Any, list[int]]:
    """Events and changes in any order within the lateness, cut at random; changes of one time keep their order."""
    sent = [(row["at"] + random.randint(0, lateness), 0, number) for number, row in enumerate(rows)]
    sent += [(row["changed"], 1, number) for number, row in enumerate(changes)]
    sent.sort()
    batches, watermarks, start, reached = [], [], 0, NO_TIME
    while start < len(sent):
        part = sent[start : start + random.choice([1, 9, 40])]
        start += len(part)
        mine = [rows[at] for _, side, at in part if not side]
        theirs = [changes[at] for _, side, at in part if side]
        reached = max([reached, *(row["at"] for row in mine), *(row["changed"] for row in theirs)])
        batches.append([table_of(mine, SCHEMA, "at", ["k"]), table_of(theirs, RULES, "changed", ["rule"])])
        watermarks.append(reached - lateness - 1)
    return batches, watermarks


def shown(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in ("rule", "owner", "k", *MEASURES.names)) for row in rows]


@pytest.mark.parametrize("seed", [*SEEDS, *BENCH])
def test_rules_give_what_brute_force_gives(tmp_path: Path, seed: int) -> None:
    """Rules are added, changed, removed and parked; each version searches the rows of its time."""
    random = Random(seed)
    ties, lateness = random.choice(["table", "event"]), random.choice([0, 5]) * SECOND
    times, count = random.choice([10, 60]), random.choice([3, 12, 40])
    changes = [random_change(random, number, random.choice([1, 5]), times) for number in range(count)]
    changes.sort(key=lambda each: each.row["changed"])
    rows = random_rows(random, random.choice([20, 60]), times)
    batches, watermarks = batches_of(random, rows, [each.row for each in changes], lateness)
    given = run_batches(operator(ties), random, tmp_path, batches, watermarks, copied=[1])
    wanted = by_hand(rows, changes, is_rule_first=ties == "table")
    texts = [(each.row["rule"], each.row["changed"] // SECOND, each.row["pattern"]) for each in changes]
    assert sorted(shown(given), key=repr) == sorted(wanted, key=repr), texts


@pytest.mark.bench
def test_a_thousand_changes_of_rules(tmp_path: Path) -> None:
    """200 rules are added, changed, removed and parked while events flow."""
    random = Random(1)
    changes = sorted((random_change(random, n, 200, 300) for n in range(1000)), key=lambda each: each.row["changed"])
    rows = random_rows(random, 400, 300)
    batches, watermarks = batches_of(random, rows, [each.row for each in changes], 5 * SECOND)
    given = run_batches(operator(), random, tmp_path, batches, watermarks, copied=[1])
    wanted = by_hand(rows, changes, is_rule_first=True)
    assert len(wanted) > 1000
    assert sorted(shown(given), key=repr) == sorted(wanted, key=repr)


class Steady(Random):
    """Batches are run once, over one partition."""

    def random(self) -> float:
        return 0.9

    def randint(self, a: int, b: int) -> int:
        return a

    def choice(self, seq: Any) -> Any:
        return seq[0]


def run(
    folder: Path,
    of: DetectRules,
    *steps: tuple[Sequence[Row], Sequence[Row], int],
    look: Callable[[State], None] = lambda state: None,
) -> list[Row]:
    """What some batches give: their events, their changes and the watermark after each, in seconds. `look` sees each state."""
    batches = [
        [table_of(list(rows), SCHEMA, "at", ["k"]), table_of(list(changes), RULES, "changed", ["rule"])]
        for rows, changes, _ in steps
    ]
    found = list[Row]()
    watermarks = [until * SECOND for *_, until in steps]
    for epoch, rows in enumerate(run_each(of, Steady(), folder, batches, watermarks, copied=[1])):
        found += rows
        store = StateStore(
            str(folder), uid="op", query="q", fingerprint="f", partition=0, partitions=1, specs=of.tables
        )
        look(store.load(epoch))
    return found


def rows_of(table: str, seen: list[list[Row]]) -> Callable[[State], None]:
    """Notes the rows of a table of the state after each batch."""
    return lambda state: seen.append(state[table].rows().to_pylist())


def event(at: int, x: int | None, k: str = "p") -> Row:
    return {"k": k, "n": at, "x": x, "at": at * SECOND}


def test_parked_rules_are_counted_with_their_reasons(tmp_path: Path) -> None:
    """What cannot be planned, or costs too much, is parked until the next version; the others go on."""
    texts = {
        "colour": "PATTERN (a) DEFINE a AS colour = 1", "open": "PATTERN (a", "long": "PATTERN (a{2000})", "none": None,
        "own": "ORDER BY at PATTERN (a)", "function": "PATTERN (a) DEFINE a AS soundex(k) = 'A'", "end": "PATTERN (a $)",
        "far": "PATTERN (a) DEFINE a AS PREV(x, 101) > 1", "all": "ALL ROWS PER MATCH PATTERN (a)", "deep": "PATTERN " + "(" * 999,
        "number": "MEASURES MATCH_NUMBER() AS m0 PATTERN (a)", "mega": "PATTERN (a) DEFINE a AS x > " + "1" * 1_000_000,
        "sums": "PATTERN (a) DEFINE a AS " + "(" * 5000 + "x" + ")" * 5000 + " > 1", "type": "PATTERN (a) DEFINE a AS x + 1",
        "text": "PATTERN (a) DEFINE a AS x > '", "good": "PATTERN (a) DEFINE a AS x > 1",
    }  # fmt: skip
    changes = [change(rule, 0, text) for rule, text in texts.items()]
    steps = ([event(1, 5)], changes, 2), ([], [change("open", 3 * SECOND, "PATTERN (a)")], 4)
    states, counts = list[list[Row]](), list[list[Row]]()
    given = run(tmp_path / "a", operator(), *steps, look=rows_of("parked", states))
    run(tmp_path / "b", operator(), *steps, look=rows_of("rule_summary", counts))
    assert [(row["rule"], row["matched_at"].second) for row in given] == [("good", 1)]
    parked = {row["rule"]: row["reason"] for row in states[0]}
    assert set(parked) == set(texts) - {"good"}
    assert "There is no column colour" in parked["colour"] and "1,000" in parked["long"]
    assert "soundex" in parked["function"].lower() and "101 rows" in parked["far"]
    assert [(row["rules"], row["parked"]) for [row] in counts[:2]] == [(1, len(texts) - 1), (2, len(texts) - 2)]


def test_a_condition_that_fails_for_a_row_does_not_hold_for_it(tmp_path: Path) -> None:
    """A division by zero or an overflow parks nothing and stops nothing: a measure that fails is null."""
    rules = {
        "row": "MEASURES 12 div a.x AS m0 PATTERN (a) DEFINE a AS 6 / x >= 2",
        "match": "MEASURES a.n AS m0 PATTERN (a b) DEFINE b AS 6 / (b.x - a.x) > 1",
        "measure": "MEASURES 6 div a.x AS m0, x AS m1, k AS other PATTERN (a)",
    }
    rows = [event(at, x) for at, x in enumerate([3, 0, None, 2, 2, 4], 1)]
    given = run(tmp_path, operator(), (rows, [change(rule, 0, text) for rule, text in rules.items()], 9))
    found = [(row["rule"], row["matched_at"].second, row["m0"], row["m1"]) for row in given]
    assert [each[1] for each in found if each[0] == "row"] == [1, 4, 5]
    assert [each[2] for each in found if each[0] == "match"] == ["5"]
    assert [each[2:] for each in found if each[0] == "measure"] == [
        ("2", "3"), (None, "0"), (None, None), ("3", "2"), ("3", "2"), ("1", "4")
    ]  # fmt: skip


def test_a_rule_that_ends_leaves_nothing_open(tmp_path: Path) -> None:
    """Its open matches are given at the time of the change when they are complete; absence is given only when its time is over."""
    rules = {
        "greedy": "MEASURES COUNT(*) AS m0 PATTERN (a b+) DEFINE b AS x > 1",
        "absent": "MEASURES a.n AS m0 PATTERN (a ABSENT(b)) WITHIN INTERVAL '5' SECOND DEFINE a AS x = 9, b AS x = 8",
        "half": "PATTERN (a b) WITHIN INTERVAL '1' HOUR DEFINE b AS x > 100",
    }
    rows = [event(1, 9), event(3, 2), event(7, 9), event(8, 2, "q")]
    added = [change(rule, 0, text) for rule, text in rules.items()]
    removed = [change(rule, 10 * SECOND, None, gone=True) for rule in rules]
    states, counts = list[list[Row]](), list[list[Row]]()
    steps = (rows, added, 9), ([], removed, 10), ([event(20, 2)], [], 30)
    given = run(tmp_path / "a", operator(), *steps, look=rows_of("open", states))
    run(tmp_path / "b", operator(), *steps, look=rows_of("rule_summary", counts))
    found = sorted((row["rule"], row["k"], row["m0"], row["matched_at"].second) for row in given)
    assert found == [("absent", "p", "1", 6), ("greedy", "p", "3", 10)]
    assert [len(each) for each in states] == [2, 0, 0, 0]
    assert [row["rules"] for [row] in counts] == [3, 0, 0, 0]


def test_a_late_change_holds_from_the_watermark_on(tmp_path: Path) -> None:
    """Rows that the watermark has passed are not searched again; what was open is closed there."""
    first, second = "MEASURES COUNT(*) AS m0 PATTERN (a+)", "MEASURES a.n AS m0 PATTERN (a)"
    early = ([event(1, 1), event(4, 1)], [change("r", 0, first)], 5)
    late = ([event(6, 1), event(7, 1)], [change("r", 2 * SECOND, second)], 8)
    given = run(tmp_path, operator(), early, late)
    assert [(row["m0"], row["matched_at"].second) for row in given] == [("2", 5), ("6", 6), ("7", 7)]


def test_rows_that_no_rule_needs_are_forgotten(tmp_path: Path) -> None:
    """Matches that are open come and go; after the last the state of a key is empty, and old versions are gone."""
    steps, states, versions = [], list[list[Row]](), list[list[Row]]()
    for number in range(40):
        at = number * 10
        rows = [event(at + 1, 1, "pqr"[number % 3]), event(at + 2, 0, "pqr"[number % 3])]
        pattern = f"PATTERN (a b) WITHIN INTERVAL '5' SECOND DEFINE a AS x >= 0, b AS x > {number}"
        steps.append((rows, [change(f"r{number % 4}", at * SECOND, pattern, gone=number % 5 == 4)], at + 9))
    run(tmp_path / "a", operator(), *steps, look=rows_of("open", states))
    run(tmp_path / "b", operator(), *steps, look=rows_of("rules", versions))
    assert not any(states)
    assert max(map(len, versions)) < 20


def test_equal_conditions_are_computed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of 30 rules with three different conditions, each batch computes three, whatever their variables are called."""
    from headwater.processing.patterns.conditions import RowCondition

    computed, holds = list[Any](), RowCondition.holds

    def counted(self: RowCondition, *arguments: Any) -> Any:
        computed.append(self.key)
        return holds(self, *arguments)

    monkeypatch.setattr(RowCondition, "holds", counted)
    rules = [change(f"r{n}", 0, f"PATTERN (v{n}) DEFINE v{n} AS v{n}.x * 2 > {n % 3}") for n in range(30)]
    given = run(tmp_path, operator(), ([event(1, 1), event(2, 0)], rules, 5))
    assert len(given) == 20 and len(computed) == 3


def test_the_text_of_a_rule_is_planned_once_per_process() -> None:
    assert isinstance(rule_plan("PATTERN (a)", FORM), RulePlan)
    assert rule_plan("PATTERN (a)", FORM) is rule_plan("PATTERN (a)", RuleForm(*FORM))


COLUMNS: dict[str, tuple[pa.DataType, Any]] = {
    "x": (pa.int64(), 2**62), "d": (pa.decimal128(10, 2), Decimal(10)), "big": (pa.decimal128(38, 0), Decimal(10**38 - 1)),
    "f": (pa.float64(), 1.5), "b": (pa.bool_(), True), "l": (pa.list_(pa.int64()), [1]), "s": (pa.struct([("a", pa.int64())]), {"a": 1}),
    "y": (pa.binary(), b"y"), "z": (pa.date32(), 0), "m": (pa.map_(pa.string(), pa.int64()), [("a", 1)]), "t": (pa.string(), "t"),
}  # fmt: skip


def texts_over(column: str) -> list[str]:
    """Every aggregate and navigation over a column, as a measure and as a condition."""
    found = []
    for name in ("SUM", "AVG", "MIN", "MAX", "COUNT", "COLLECT_LIST", "FIRST", "LAST", "PREV"):
        found += [
            f"MEASURES {name}({column}) AS m0, {name}(a.{column}) AS m1 PATTERN (a{{3}})",
            f"MEASURES {name}(a.{column}) AS m1 PATTERN (a{{3}})",
            f"PATTERN (a{{3}}) DEFINE a AS {name}({column}) IS NOT NULL",
            f"PATTERN (a b+) DEFINE b AS {name}(a.{column}) = {name}(b.{column})",
        ]
        if name not in ("FIRST", "LAST", "PREV"):
            found.append(f"MEASURES {name}(DISTINCT a.{column}) AS m0 PATTERN (a{{3}})")
            found.append(f"PATTERN (a b+) DEFINE b AS {name}(DISTINCT a.{column}) IS NOT NULL")
    return found


@pytest.mark.parametrize("column", COLUMNS)
def test_no_rule_can_stop_the_others(tmp_path: Path, column: str) -> None:
    """Aggregates over every type and over the largest values are parked, or give null."""
    schema = pa.schema([("k", pa.string()), *((name, type_) for name, (type_, _) in COLUMNS.items()), ("at", UTC_US)])
    measures = pa.schema([("m0", pa.string()), ("m1", pa.float64())])
    form = RuleForm(schema, ("k",), "at", measures, 100_000)
    rows = [{"k": "p", **{name: value for name, (_, value) in COLUMNS.items()}, "at": n * SECOND} for n in range(1, 4)]
    texts = [*texts_over(column), "PATTERN (good)"]
    changes = [change(f"r{number}", 0, text) for number, text in enumerate(texts)]
    batch = [table_of(rows, schema, "at", ["k"]), table_of(changes, RULES, "changed", ["rule"])]
    given = run_batches(operator(form=form), Steady(), tmp_path, [batch], [9 * SECOND], copied=[1])
    assert sum(row["rule"] == f"r{len(texts) - 1}" for row in given) == 3
    assert {row["rule"] for row in given} >= {
        f"r{number}" for number, text in enumerate(texts) if "COUNT(a." in text and "=" not in text
    }


def test_sums_and_averages_are_exact_or_null(tmp_path: Path) -> None:
    """An average of decimals has their type's digits, and a sum that its type cannot hold is null."""
    schema = pa.schema([("k", pa.string()), ("x", pa.int64()), ("d", pa.decimal128(10, 2)), ("at", UTC_US)])
    form = RuleForm(schema, ("k",), "at", pa.schema([("s", pa.int64()), ("d", pa.decimal128(14, 6))]), 100_000)
    values = [(1, "1.00"), (2, "1.00"), (2**62, "2.00"), (2**62, "0.00")]
    rows = [
        {"k": "p", "x": x, "d": Decimal(d), "at": at * SECOND} for at, (x, d) in enumerate(values, 1)
    ]  # fmt: skip
    texts = [
        "MEASURES SUM(a.x) AS s, AVG(a.d) AS d PATTERN (a{1,3}) DEFINE a AS AVG(d) <= 1.333333",
        "MEASURES SUM(a.x) AS s PATTERN (a{4})",
    ]
    changes = [change(f"r{number}", 0, text) for number, text in enumerate(texts)]
    batch = [table_of(rows, schema, "at", ["k"]), table_of(changes, RULES, "changed", ["rule"])]
    given = run_batches(operator(form=form), Steady(), tmp_path, [batch], [9 * SECOND], copied=[1])
    found = sorted((row["rule"], row["s"], row["d"] and float(row["d"])) for row in given if row["rule"] == "r0")
    assert found == [("r0", 2**62, 0.0), ("r0", 3 + 2**62, 1.333333)]
    assert [row["s"] for row in given if row["rule"] == "r1"] == [None]
