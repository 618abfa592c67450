"""The text of a pattern: what it becomes, and what is refused with its place."""

from __future__ import annotations

import pytest

from headwater.model.errors import HeadwaterError, InvalidInput
from headwater.processing.patterns import tree
from headwater.processing.patterns.automaton import automaton_of
from headwater.processing.patterns.grammar import Order, Skip, parse_pattern
from tests.processing.patterns.test_detect import SCHEMA
from tests.rigs.processing.pattern_runs import Pattern

A, B = tree.Variable("a"), tree.Variable("b")


def parsed(pattern: str) -> tree.Part:
    return placeless(parse_pattern(f"ORDER BY at PATTERN ({pattern})").pattern)


def placeless(part: tree.Part) -> tree.Part:
    """A part whose variables say nothing of their places."""
    if isinstance(part, tree.Variable):
        return part._replace(place=0)
    if isinstance(part, (tree.Sequence, tree.Choice, tree.Permutation)):
        return part._replace(parts=tuple(map(placeless, part.parts)))
    if isinstance(part, (tree.Repetition, tree.Exclusion)):
        return part._replace(part=placeless(part.part))
    return part


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a", A),
        ("A b", tree.Sequence((A, B))),
        ("a | b", tree.Choice((A, B))),
        ("a b | b", tree.Choice((tree.Sequence((A, B)), B))),
        ("(a | ()) b", tree.Sequence((tree.Choice((A, tree.Empty())), B))),
        ("a*", tree.Repetition(A, 0, None)),
        ("a+?", tree.Repetition(A, 1, None, is_greedy=False)),
        ("a??", tree.Repetition(A, 0, 1, is_greedy=False)),
        ("a{3}", tree.Repetition(A, 3, 3)),
        ("a{,3}", tree.Repetition(A, 0, 3)),
        ("a{2,}?", tree.Repetition(A, 2, None, is_greedy=False)),
        ("^ a $", tree.Sequence((tree.Anchor("begin"), A, tree.Anchor("end")))),
        ("{- a -} b", tree.Sequence((tree.Exclusion(A), B))),
        ("PERMUTE(a, b b)", tree.Permutation((A, tree.Sequence((B, B))))),
        ("`a` -- a comment\n/* and | another */ b", tree.Sequence((A, B))),
    ],
)
def test_every_construct_is_read(text: str, wanted: tree.Part) -> None:
    """Names are compared without case, and comments are no part of it."""
    assert parsed(text) == wanted


def test_every_clause_is_read() -> None:
    """All of them, in the standard's order, with MATCH_RECOGNIZE around or without."""
    text = """PARTITION BY `my key`, k ORDER BY at, n DESC, x NULLS LAST MEASURES a.x AS X, FINAL COUNT(*) AS `the n`
        ALL ROWS PER MATCH OMIT EMPTY MATCHES AFTER MATCH SKIP TO FIRST b PATTERN (a b) WITHIN INTERVAL '10' MINUTE
        SUBSET u = (a, b) DEFINE a AS x > 1 AND f(x, 2) IN (1, 2), b AS TRUE"""
    found = parse_pattern(text)
    assert found.key == ("my key", "k") and found.within_us == 600_000_000 and found.subsets == {"u": ("a", "b")}
    assert found.order == (
        Order("at"),
        Order("n", is_descending=True, nulls_first=False),
        Order("x", nulls_first=False),
    )
    assert {name: each.text for name, each in found.measures.items()} == {"X": "a.x", "the n": "FINAL COUNT(*)"}
    assert {name: each.text for name, each in found.define.items()} == {"a": "x > 1 AND f(x, 2) IN (1, 2)", "b": "TRUE"}
    assert (found.rows, found.empty, found.skip._replace(place=0)) == ("all", "omit", Skip("first", "b"))
    assert parse_pattern(f"MATCH_RECOGNIZE ({text})")._replace(text="").define.keys() == found.define.keys()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("PATTERN (a)", "no ORDER BY"),
        ("ORDER BY at", "no PATTERN"),
        ("ORDER BY at PATTERN (a", "parenthesis is not closed"),
        ("ORDER BY at PATTERN (a))", "closes that was never open"),
        ("ORDER BY at PATTERN (a |)", "part of PATTERN is missing.*line 1, column 25"),
        ("ORDER BY at PATTERN (a{2,1})", "allows no repetition"),
        ("ORDER BY at PATTERN (a{0})", "allows no repetition"),
        ("ORDER BY at PATTERN (a{})", "needs a number"),
        ("ORDER BY at PATTERN (a{99999})", "counts to 10,000"),
        ("ORDER BY at PATTERN (^*)", "cannot be repeated"),
        ("ORDER BY at PATTERN (a) WITHIN 0 seconds", "above zero"),
        ("ORDER BY at PATTERN (a) WITHIN soon", "line 1, column 25"),
        ("ORDER BY at PATTERN (a) DEFINE a x", "variable AS condition"),
        ("ORDER BY at PATTERN (a) DEFINE a AS x > 1, a AS x > 2", "there twice"),
        ("ORDER BY at PATTERN (a) MEASURES a.x AS y", "twice or too late"),
        ("ORDER BY at DESC DOWN PATTERN (a)", "ASC, DESC"),
        ("ORDER BY at PATTERN ('a')", "cannot have 'a' here"),
        ("ORDER BY at PATTERN (a) DEFINE a AS x = 'b", "no partner"),
        (f"ORDER BY at PATTERN (PERMUTE({', '.join('a' * 50)}))", "PERMUTE has 50 parts"),
        (f"ORDER BY at PATTERN ({'(' * 200}a{')' * 200})", "more than 100 parentheses"),
        ("ORDER BY at PATTERN (a) SUBSET u = a", "name = "),
        ("ORDER BY at AFTER MATCH SKIP SOMEWHERE PATTERN (a)", "SOMEWHERE is unknown"),
        ("ORDER BY at ONE ROW PER MATCH ALL ROWS PER MATCH PATTERN (a)", "exclude each other"),
        ("x" * 100_001, "100,001 characters"),
    ],
)
def test_a_text_that_is_no_pattern_is_refused(text: str, wanted: str) -> None:
    """With what is wrong, and where."""
    with pytest.raises(InvalidInput, match=wanted):
        parse_pattern(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("PATTERN (())", "never matches a row"),
        ("PATTERN (a $ b)", "never matches a row"),
        ("PATTERN (a) DEFINE b AS x > 1", "b is defined but not in PATTERN"),
        ("PATTERN (a) DEFINE a AS y > 1", "no column y"),
        ("PATTERN (a) DEFINE a AS b.x > 1", "no variable b"),
        ("PATTERN (a) SUBSET u = (a, c)", "no variable c"),
        ("PATTERN (a) DEFINE a AS x", "condition of a is not valid"),
        ("PATTERN (a) DEFINE a AS x >", "is not SQL"),
        ("PATTERN (a) DEFINE a AS FINAL LAST(x) > 1", "FINAL is for MEASURES"),
        ("PATTERN (a) DEFINE a AS x IN (SELECT 1)", "no subqueries"),
        ("MEASURES FIRST(a.x, -1) AS y PATTERN (a)", "whole number"),
        ("MEASURES a.x AS k PATTERN (a)", "has a column k already"),
        ("MEASURES SUM(a.x + b.x) AS y PATTERN (a b)", "names one variable"),
        ("MEASURES LAST(PREV(x)) AS y PATTERN (a)", "cannot contain PREV"),
        ("AFTER MATCH SKIP TO a PATTERN (a b)", "first row of the same match"),
        ("AFTER MATCH SKIP TO LAST a PATTERN (a+ b)", "first row of the same match"),
        ("AFTER MATCH SKIP TO b PATTERN (a b?)", "no row of b"),
        ("AFTER MATCH SKIP TO c PATTERN (a b)", "no variable c"),
        ("ALL ROWS PER MATCH WITH UNMATCHED ROWS PATTERN (a {- b -})", "excludes"),
        ("PATTERN ((a?){2000} b)", "more than 30,000 positions or 300,000 steps"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused(text: str, wanted: str) -> None:
    """Before anything runs."""
    with pytest.raises(HeadwaterError, match=wanted):
        Pattern(f"PARTITION BY k ORDER BY at {text}", SCHEMA)


def test_an_order_of_many_parts_has_a_position_for_each_set() -> None:
    """Twelve parts have 479,001,600 orders; the automaton has 12 · 2¹¹ positions."""
    part = tree.Permutation(tuple(tree.Variable(f"v{number}") for number in range(12)))
    assert len(automaton_of(part).position) == 12 * 2**11
