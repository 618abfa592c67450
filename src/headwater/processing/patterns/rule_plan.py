"""The plan of a rule: a row pattern that came as an event, with everything compiled that its search needs.

A rule is a text without PARTITION BY and ORDER BY; `RuleForm` says what is the same for all rules. Rules are compiled where they are
searched for, so they have the expression language only, and no function that Spark alone knows. A rule that cannot be planned, or that
would cost too much, is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa

from headwater.model.ddl import type_to_ddl
from headwater.model.errors import InvalidInput
from headwater.processing.expressions.expression import Expression, compile_expression
from headwater.processing.patterns.automaton import Automaton
from headwater.processing.patterns.formula import MatchNumber, SplitFormula
from headwater.processing.patterns.grammar import RowPattern, failure, parse_pattern
from headwater.processing.patterns.operator import DetectPlan
from headwater.processing.patterns.plan import Formulas, formulas_of, has_anchor, plan_of

POSITIONS_MAX = 1_000
NEIGHBOURS_MAX = 100
"""The number of positions of a rule, and how far PREV and NEXT may reach: every rule pays for what one needs."""

PLANS_KEPT = 16_384


class RuleForm(NamedTuple):
    """What is the same for all rules: the columns of the events, key and time, and the measures with their types."""

    events: pa.Schema
    key: tuple[str, ...]
    at: str
    measures: pa.Schema
    rows_max: int


class RulePlan(NamedTuple):
    """One rule: its search, and its measures as expressions over the terms of the search."""

    detect: DetectPlan
    measures: Mapping[str, Expression]


@lru_cache(PLANS_KEPT)
def rule_plan(text: str, form: RuleForm) -> RulePlan | str:
    """The plan of a text, or the reason why there is none. All partitions of a process need the same ones."""
    try:
        return _planned(text, form)
    except InvalidInput as error:
        return str(error)
    except RecursionError:
        return "The rule has expressions that are too deep. Use fewer parentheses."


def _planned(text: str, form: RuleForm) -> RulePlan:
    pattern = parse_pattern(text, key=form.key, at=form.at)
    declared = {name.lower(): name for name in form.measures.names}
    given = {declared[name.lower()]: each for name, each in pattern.measures.items() if name.lower() in declared}
    pattern = pattern._replace(measures=given)
    _check_clauses(pattern)
    formulas = formulas_of(pattern, form.events.names)
    _check_number(pattern, formulas)
    plan = plan_of(pattern, formulas, form.events, {}, rows_max=form.rows_max, tries=True)
    _check_cost(plan.automaton, plan)
    computed = [pa.field(name, each.type) for name, each in plan.computed.items()]
    terms = pa.schema(plan.measures.fields(pa.schema([*form.events, *computed])))
    measures = {
        name: _measure(pattern, name, each, terms, form.measures.field(name).type)
        for name, each in formulas.measures.items()
    }
    return RulePlan(plan, measures)


def _check_clauses(pattern: RowPattern) -> None:
    """Refuses the clauses that would give rows of another form, or that need a partition with a begin and an end."""
    text = pattern.text
    if pattern.rows == "all":
        place = max(text.upper().find("ALL"), 0)
        raise failure(text, place, "A rule gives one row per match", "Use ONE ROW PER MATCH.")
    for anchor, sign in (("begin", "^"), ("end", "$")):
        if has_anchor(pattern, anchor):
            what = f"A rule cannot have {sign}: it can begin and end in the middle of a partition"
            raise failure(text, max(text.find(sign), 0), what, f"Remove {sign}.")


def _check_number(pattern: RowPattern, formulas: Formulas) -> None:
    if any(isinstance(term, MatchNumber) for term in formulas.terms.values()):
        place = max(pattern.text.upper().find("MATCH_NUMBER"), 0)
        what = "A rule cannot have MATCH_NUMBER(): it keeps a number for each key for ever"
        raise failure(pattern.text, place, what, "Remove it.")


def _check_cost(automaton: Automaton, plan: DetectPlan) -> None:
    if automaton.accept > POSITIONS_MAX:
        raise InvalidInput(
            f"The rule has {automaton.accept:,} positions; at most {POSITIONS_MAX:,} are allowed.",
            advice="Use smaller numbers in its quantifiers, or fewer parts in PERMUTE.",
        )
    if max(plan.behind, plan.rule.ahead) > NEIGHBOURS_MAX:
        raise InvalidInput(
            f"The rule refers to {max(plan.behind, plan.rule.ahead):,} rows before or after; at most {NEIGHBOURS_MAX} are allowed.",
            advice="Use smaller numbers in PREV and NEXT.",
        )


def _measure(pattern: RowPattern, name: str, formula: SplitFormula, terms: pa.Schema, type_: pa.DataType) -> Expression:
    """A measure in its declared type."""
    try:
        found = compile_expression(formula.sql, terms)
        return (
            found if found.type == type_ else compile_expression(f"CAST({formula.sql} AS {type_to_ddl(type_)})", terms)
        )
    except InvalidInput as error:
        place = pattern.measures[name].place
        raise failure(pattern.text, place, f"The measure {name} is not valid: {error.what}", error.advice) from None
