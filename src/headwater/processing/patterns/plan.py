"""The plan of a pattern: its text checked against the columns of the rows, with everything compiled that the operator needs.

A value or condition that the expression language does not have is computed by Spark, before the operator. Then the operator is not
fused into its source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from headwater.model.errors import InvalidInput, Unsupported
from headwater.processing.expressions.expression import Expression, compile_expression
from headwater.processing.patterns import tree
from headwater.processing.patterns.automaton import ABSENT, Automaton, automaton_of
from headwater.processing.patterns.conditions import RowCondition
from headwater.processing.patterns.formula import Fold, MatchNumber, Navigation, SplitFormula, Term, split_formula
from headwater.processing.patterns.grammar import RowPattern, failure
from headwater.processing.patterns.measures import Measures
from headwater.processing.patterns.operator import MATCHED_AT, TIMED_OUT, DetectPlan
from headwater.processing.patterns.outcome import Rule
from headwater.processing.patterns.trace import MatchCondition


class Formulas(NamedTuple):
    """The formulas of a pattern, split into terms."""

    conditions: Mapping[str, SplitFormula]
    measures: Mapping[str, SplitFormula]

    @property
    def terms(self) -> dict[str, Term]:
        """All terms of measures."""
        return {name: term for each in self.measures.values() for name, term in each.terms.items()}

    def values(self) -> list[str]:
        """The values of all terms, each once."""
        everything = [*self.conditions.values(), *self.measures.values()]
        terms = [term for each in everything for term in each.terms.values() if not isinstance(term, MatchNumber)]
        return list(dict.fromkeys(term.value for term in terms if term.value is not None))


def formulas_of(pattern: RowPattern, columns: Sequence[str]) -> Formulas:
    """The formulas of a pattern over rows with these columns."""
    conditions = {
        name: split_formula(pattern, formula, columns, is_measure=False) for name, formula in pattern.define.items()
    }
    measures = {
        name: split_formula(pattern, formula, columns, is_measure=True, prefix=f"_t{number}_")
        for number, (name, formula) in enumerate(pattern.measures.items())
    }
    return Formulas(conditions, measures)


def spark_parts(pattern: RowPattern, formulas: Formulas, schema: pa.Schema) -> dict[str, str]:
    """What Spark has to compute before the operator: Spark SQL of values and of whole conditions, by names of columns."""
    found = list[str]()
    for value in formulas.values():
        try:
            compile_expression(value, schema)
        except Unsupported:
            found.append(value)
    for name, formula in formulas.conditions.items():
        is_own = formula.is_of_row(_variables_with(pattern, name)) and not formula.ahead and not formula.behind
        if is_own and not _compiles(formula, schema):
            found.append(inlined(formula))
    return {f"_value_{number}": sql for number, sql in enumerate(dict.fromkeys(found))}


def plan_of(
    pattern: RowPattern, formulas: Formulas, schema: pa.Schema, parts: Mapping[str, str], *, rows_max: int = 100_000,
    in_log_order: bool = True, timeouts: bool = False, tries: bool = False,
) -> DetectPlan:  # fmt: skip
    """The plan for rows of a schema, of which some columns are `parts` that Spark has computed.

    With `tries` a row for which a condition fails does not satisfy it.
    """
    automaton = automaton_of(pattern.pattern)
    check(pattern, automaton)
    computed_by_spark = {sql: name for name, sql in parts.items()}
    values, computed = dict[str, str](), dict[str, Expression]()
    for value in formulas.values():
        name = value[1:-1].replace("``", "`")
        if value in computed_by_spark:
            values[value] = computed_by_spark[value]
        elif value.startswith("`") and name in schema.names:
            values[value] = name
        else:
            values[value] = f"_computed_{len(computed)}"
            computed[values[value]] = compile_expression(value, schema)
    known = pa.schema([*schema, *(pa.field(name, each.type) for name, each in computed.items())])
    _check_folds(pattern, formulas, values, known)
    members = {
        name: [number for number, each in enumerate(automaton.variables) if each in pattern.members(name)]
        for name in (*automaton.variables, *pattern.subsets)
    }
    of_match = dict[int, MatchCondition]()
    conditions, compiled = dict[str, RowCondition](), dict[str, RowCondition]()
    for name, formula in formulas.conditions.items():
        whole = computed_by_spark.get(inlined(formula)) if not formula.ahead and not formula.behind else None
        if whole is not None:
            formula = SplitFormula("_t0", {"_t0": Navigation(whole, None)})
        elif not formula.is_of_row(_variables_with(pattern, name)):
            of_match[automaton.variables.index(name)] = _compiled(
                pattern, name, formula, values, members, known, tries=tries
            )
            continue
        key = repr(formula)
        if key not in compiled:
            columns = {**values, **({whole: whole} if whole else {})}
            compiled[key] = _compiled(pattern, name, formula, columns, None, known, tries=tries)
        conditions[name] = compiled[key]
    measures = Measures(formulas.terms, values, members, spellings(pattern, automaton))
    skip_to = frozenset(members[pattern.skip.variable] if pattern.skip.variable else ())
    is_numbered = any(isinstance(term, MatchNumber) for term in formulas.terms.values())
    rule = Rule(
        pattern.within_us, rows_max, pattern.skip.to, skip_to, _ahead(formulas),
        is_numbered or pattern.empty == "unmatched", timeouts,
    )  # fmt: skip
    if timeouts:
        _check_timeouts(pattern, automaton, is_free=not is_numbered and not of_match)
    return DetectPlan(
        pattern.text, pattern.key, pattern.order, automaton, rule, computed, conditions, measures,
        pattern.rows == "all", pattern.empty, _behind(pattern, formulas, automaton), is_numbered or has_anchor(pattern, "begin"),
        in_log_order, of_match, spellings(pattern, automaton),
    )  # fmt: skip


def _compiled(
    pattern: RowPattern, name: str, formula: SplitFormula, values: Mapping[str, str],
    members: Mapping[str, Sequence[int]] | None, schema: pa.Schema, *, tries: bool,
) -> Any:  # fmt: skip
    """A condition; one of the match where `members` are given."""
    try:
        if members is not None:
            return MatchCondition(formula, values, members, schema, tries=tries)
        return RowCondition(formula, values, schema, tries=tries)
    except InvalidInput as error:
        place = pattern.define[name].place
        what = f"The condition of {name} is not valid: {error.what}"
        raise failure(pattern.text, place, what, error.advice) from None


def spellings(pattern: RowPattern, automaton: Automaton) -> list[str]:
    """The names of variables as PATTERN has them first."""
    found = dict[str, str]()
    for each in tree.variables(pattern.pattern):
        text = pattern.text[each.place :]
        found.setdefault(each.name, each.name if text.startswith("`") else text[: len(each.name)])
    return [found.get(name, name) for name in automaton.variables]


def has_anchor(pattern: RowPattern, at: str) -> bool:
    """Whether a pattern has ^ (`begin`) or $ (`end`)."""
    return _has(pattern.pattern, lambda part: isinstance(part, tree.Anchor) and part.at == at)


def inlined(formula: SplitFormula) -> str:
    """A formula whose terms are values of the row, as Spark SQL."""
    import sqlglot
    from sqlglot import expressions as sql

    def put(node: sql.Expression) -> sql.Expression:
        if not isinstance(node, sql.Column) or node.name not in formula.terms:
            return node
        term = formula.terms[node.name]
        value = getattr(term, "value", None) or "NULL"
        return sql.paren(sqlglot.parse_one(value, dialect="databricks"))

    return sqlglot.parse_one(formula.sql, dialect="databricks").transform(put).sql("databricks")


def check(pattern: RowPattern, automaton: Automaton) -> None:
    """Refuses what can never work, with the place in the text."""
    names = {each.name for each in tree.variables(pattern.pattern)}
    for name, formula in pattern.define.items():
        if name not in names:
            raise failure(pattern.text, formula.place, f"Variable {name} is defined but not in PATTERN", "Remove it.")
    for name, members in pattern.subsets.items():
        unknown = [each for each in members if each not in names]
        if unknown or name in names:
            what = f"There is no variable {unknown[0]}" if unknown else f"{name} is a variable and a subset"
            raise failure(pattern.text, pattern.text.upper().find("SUBSET"), what, "Use variables of PATTERN.")
    starts, everywhere = {*automaton.first, *automaton.first_at_begin}, set(range(automaton.accept))
    if not automaton.completes((each for each in starts if each in everywhere), everywhere):
        place = pattern.text.upper().find("PATTERN")
        raise failure(pattern.text, place, "The pattern never matches a row", "Change PATTERN.")
    if automaton.waits and pattern.within_us is None:
        place = pattern.text.upper().find("ABSENT")
        raise failure(pattern.text, place, "ABSENT at the end of a pattern needs WITHIN", "Add WITHIN.")
    _check_output(pattern)
    _check_skip(pattern, automaton, starts)


def _check_folds(pattern: RowPattern, formulas: Formulas, values: Mapping[str, str], known: pa.Schema) -> None:
    """Refuses sums of what is no number, and different values of what has no order."""
    texts = [*pattern.define.values(), *pattern.measures.values()]
    for formula, text in zip([*formulas.conditions.values(), *formulas.measures.values()], texts, strict=True):
        for term in formula.terms.values():
            if not isinstance(term, Fold) or term.value is None:
                continue
            kind = known.field(values[term.value]).type
            is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
            if term.kind in ("sum", "avg") and not is_number:
                what = f"{term.kind.upper()} needs numbers, and {term.value} is {kind}"
                raise failure(pattern.text, text.place, what, "Cast it.")
            if term.is_distinct and pa.types.is_nested(kind):
                raise failure(pattern.text, text.place, f"DISTINCT cannot compare {kind}", "Use a part of it.")


def _check_timeouts(pattern: RowPattern, automaton: Automaton, *, is_free: bool) -> None:
    if not is_free or automaton.waits or pattern.empty == "unmatched" or not pattern.within_us:
        raise Unsupported(
            "timeouts=True needs WITHIN, and conditions that do not depend on the match; it excludes MATCH_NUMBER(), "
            "WITH UNMATCHED ROWS and ABSENT at the end of the pattern.",
            advice="Change the pattern, or remove timeouts=True.",
        )


def _check_output(pattern: RowPattern) -> None:
    taken = {name.lower() for name in pattern.key} if pattern.rows == "one" else set[str]()
    for name, formula in pattern.measures.items():
        if name.lower() in taken or name.lower() in (MATCHED_AT, TIMED_OUT):
            raise failure(pattern.text, formula.place, f"The result has a column {name} already", "Use another name.")
    if pattern.empty == "unmatched" and _has(pattern.pattern, lambda part: isinstance(part, tree.Exclusion)):
        place = pattern.text.find("{-")
        raise failure(pattern.text, place, "WITH UNMATCHED ROWS excludes {- … -}", "Remove one of them.")


def _check_skip(pattern: RowPattern, automaton: Automaton, starts: set[int]) -> None:
    """SKIP TO a variable needs a row of it in every match, which is not the first one."""
    skip = pattern.skip
    if skip.variable is None:
        return
    members = pattern.members(skip.variable)
    everywhere = automaton.allowing(lambda name: name.removeprefix("!") not in members or name.startswith("!"))
    named = set(range(automaton.accept)) - everywhere
    if not named:
        raise failure(
            pattern.text, skip.place, f"There is no variable {skip.variable}", "Use one of PATTERN or SUBSET."
        )
    if automaton.completes((each for each in starts if each in everywhere), everywhere):
        advice = "Use SKIP TO NEXT ROW, or make the variable necessary."
        raise failure(pattern.text, skip.place, f"A match can have no row of {skip.variable}", advice)
    through = set(range(automaton.accept)) if skip.to == "first" else everywhere
    for each in starts & named:
        if automaton.completes(automaton.follow[each], through):
            advice = "Use SKIP TO NEXT ROW."
            raise failure(pattern.text, skip.place, "SKIP TO can lead to the first row of the same match", advice)


def _variables_with(pattern: RowPattern, name: str) -> list[str]:
    """The names that stand for the row in the condition of a variable: its own, and those of subsets that have it."""
    return [name, *(subset for subset, members in pattern.subsets.items() if name in members)]


def _compiles(formula: SplitFormula, schema: pa.Schema) -> bool:
    try:
        compile_expression(inlined(formula), schema)
    except Unsupported:
        return False
    return True


def _ahead(formulas: Formulas) -> int:
    return max((each.ahead for part in formulas for each in part.values()), default=0)


def _behind(pattern: RowPattern, formulas: Formulas, automaton: Automaton) -> int:
    """How many rows before its start a match refers to: a row that has rows of the match before it needs fewer."""
    depth = automaton.depth()

    def needed(term: Term, own: str | None) -> int:
        if not isinstance(term, Navigation) or term.shift >= 0:
            return 0
        named = term.variable if term.variable is not None else own if term.is_last and term.offset == 0 else None
        variables = (
            [sign + each for each in pattern.members(named) for sign in ("", ABSENT)] if named is not None else []
        )
        return -term.shift - min((depth[each] for each in variables if each in depth), default=0)

    conditions = (needed(term, name) for name, each in formulas.conditions.items() for term in each.terms.values())
    return max(0, *conditions, *(each.behind for each in formulas.measures.values()), 0)


def _has(part: tree.Part, wanted: Callable[[tree.Part], bool]) -> bool:
    if wanted(part):
        return True
    if isinstance(part, (tree.Sequence, tree.Choice, tree.Permutation)):
        return any(_has(each, wanted) for each in part.parts)
    return isinstance(part, (tree.Repetition, tree.Exclusion)) and _has(part.part, wanted)
