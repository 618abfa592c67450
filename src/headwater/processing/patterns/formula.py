"""Formulas: the expressions of DEFINE and MEASURES, split into terms and what is computed of them.

A **term** moves between the rows of a match: `LAST(b.price, 1)`, `PREV(price)`, `AVG(b.price)`, `CLASSIFIER()`. A term has a **value**, an
expression over the columns of one row. In the formula each term becomes a column of its own, so what is left is an expression over
one row again: `LAST(b.price) / FIRST(a.price) - 1` is `_t0 / _t1 - 1` of the terms `LAST(b.price)` and `FIRST(a.price)`.

Values and what is left are Spark SQL. A condition does not depend on the match where each of its terms is the row itself or a row at
a fixed distance from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from headwater.model.errors import InvalidInput
from headwater.processing.patterns.grammar import Formula, PatternToken, RowPattern, failure, tokens_of
from headwater.processing.patterns.tree import variables

_OURS = ("FIRST", "LAST", "PREV", "NEXT", "CLASSIFIER", "MATCH_NUMBER")
_SIDES = ("RUNNING", "FINAL")
_MARK = "hw_"
SHIFT_MAX = 10_000


class Navigation(NamedTuple):
    """A value at one row: the first or the last of a variable, `offset` rows further on, then `shift` rows away in the partition."""

    value: str | None
    """None is the variable that the row matches."""
    variable: str | None
    """None are all variables."""
    is_last: bool = True
    offset: int = 0
    shift: int = 0
    is_final: bool = False


class Fold(NamedTuple):
    """An aggregate over the rows of a variable."""

    kind: str
    value: str | None
    """None counts rows."""
    variable: str | None
    is_distinct: bool = False
    is_final: bool = False


class MatchNumber(NamedTuple):
    """Which match of its partition it is, from 1 on."""


Term: TypeAlias = Navigation | Fold | MatchNumber

FOLDS = ("count", "sum", "avg", "min", "max", "collect_list")


class SplitFormula(NamedTuple):
    """An expression over terms: `sql` has a column for each of them, by its name."""

    sql: str
    terms: Mapping[str, Term]

    def is_of_row(self, members: Sequence[str]) -> bool:
        """Whether a condition of these variables depends on rows at fixed distances only, and not on the match."""
        return all(
            isinstance(term, Navigation)
            and term.value is not None
            and term.is_last
            and term.offset == 0
            and (term.variable is None or term.variable in members)
            for term in self.terms.values()
        )

    @property
    def ahead(self) -> int:
        """How many rows after the last one it refers to."""
        return max((term.shift for term in self.terms.values() if isinstance(term, Navigation)), default=0)

    @property
    def behind(self) -> int:
        """How many rows before a row it refers to."""
        return -min((term.shift for term in self.terms.values() if isinstance(term, Navigation)), default=0)


def split_formula(
    pattern: RowPattern, formula: Formula, columns: Sequence[str], *, is_measure: bool, prefix: str = "_t"
) -> SplitFormula:
    """The terms of an expression, whose names begin with a prefix; `columns` are those of the rows."""
    return _Splitter(pattern, formula, columns, is_measure=is_measure, prefix=prefix).split()


class _Splitter:
    """Splits one formula."""

    def __init__(
        self, pattern: RowPattern, formula: Formula, columns: Sequence[str], *, is_measure: bool, prefix: str
    ) -> None:
        self._pattern, self._formula, self._is_measure, self._prefix = pattern, formula, is_measure, prefix
        self._columns = {name.lower(): name for name in columns}
        self._names = {each.name for each in variables(pattern.pattern)} | set(pattern.subsets)
        self._terms: dict[Term, str] = {}

    def split(self) -> SplitFormula:
        """The formula and its terms."""
        import sqlglot  # 0.2 s, for those who search for patterns

        try:
            node: Any = sqlglot.parse_one(_rewritten(tokens_of(self._formula.text)), dialect="databricks")
        except (sqlglot.errors.SqlglotError, RecursionError) as error:
            raise self._failure("", f"The expression is not SQL: {str(error).splitlines()[0]}") from None
        found = self._replaced(node, is_final=False)
        return SplitFormula(found.sql("databricks"), {name: term for term, name in self._terms.items()})

    def _failure(self, near: str, what: str, advice: str = "Change the expression.") -> InvalidInput:
        found = re.search(rf"\b{re.escape(near)}\b", self._formula.text, re.IGNORECASE) if near else None
        place = self._formula.place + (found.start() if found else 0)
        return failure(self._pattern.text, place, what, advice)

    def _replaced(self, node: Any, *, is_final: bool) -> Any:
        """A node with columns in place of terms."""
        from sqlglot import expressions as sql

        if isinstance(node, (sql.Subquery, sql.Select, sql.Window, sql.Exists)):
            raise self._failure("", "Patterns have no subqueries and no windows")
        term = self._term(node, is_final=is_final)
        if term is not None:
            name = self._terms.setdefault(term, f"{self._prefix}{len(self._terms)}")
            return sql.column(name)
        if isinstance(node, sql.Anonymous) and node.name.lower() in (f"{_MARK}final", f"{_MARK}running"):
            is_final = node.name.lower() == f"{_MARK}final"
            if is_final and not self._is_measure:
                raise self._failure("FINAL", "FINAL is for MEASURES only", "Remove it: conditions see the rows so far.")
            return self._replaced(node.expressions[0], is_final=is_final)
        if isinstance(node, sql.AggFunc):
            raise self._failure(node.key, f"{node.sql_name()} cannot be computed over rows of a match")
        node = node.copy()
        for key, child in list(node.args.items()):
            if isinstance(child, sql.Expression):
                node.set(key, self._replaced(child, is_final=is_final))
            elif isinstance(child, list):
                parts = (isinstance(each, sql.Expression) for each in child)
                found = zip(child, parts, strict=True)
                node.set(key, [self._replaced(each, is_final=is_final) if is_part else each for each, is_part in found])
        return node

    def _term(self, node: Any, *, is_final: bool) -> Term | None:
        from sqlglot import expressions as sql

        if isinstance(node, sql.Column):
            return Navigation(*self._value(node), is_final=is_final)
        if isinstance(node, sql.Anonymous) and node.name.lower().startswith(_MARK):
            name = node.name.lower().removeprefix(_MARK)
            if name == "match_number":
                if not self._is_measure:
                    raise self._failure("MATCH_NUMBER", "MATCH_NUMBER() is for MEASURES only")
                return MatchNumber()
            if name in ("first", "last", "prev", "next", "classifier"):
                return self._navigation(node, is_final=is_final)
            return None
        kind = {
            "count": "count",
            "sum": "sum",
            "avg": "avg",
            "min": "min",
            "max": "max",
            "arrayagg": "collect_list",
        }.get(node.key)
        return None if kind is None else self._fold(kind, node, is_final=is_final)

    def _navigation(self, node: Any, *, is_final: bool) -> Navigation:
        """FIRST, LAST, PREV, NEXT and CLASSIFIER, in each other."""
        from sqlglot import expressions as sql

        name, parts = node.name.lower().removeprefix(_MARK), node.expressions
        if name == "classifier":
            return Navigation(None, self._variable(parts[0].name) if parts else None, is_final=is_final)
        if not 1 <= len(parts) <= 2:
            raise self._failure(name, f"{name.upper()} has a value and perhaps a number of rows")
        offset = self._offset(name, parts[1]) if len(parts) == 2 else int(name in ("prev", "next"))
        inner = parts[0]
        if isinstance(inner, sql.Anonymous) and inner.name.lower() in (f"{_MARK}final", f"{_MARK}running"):
            is_final = inner.name.lower() == f"{_MARK}final"
            inner = inner.expressions[0]
        is_moved = isinstance(inner, sql.Anonymous) and inner.name.lower().startswith(_MARK)
        if name in ("first", "last"):
            if is_moved and inner.name.lower() != f"{_MARK}classifier":
                raise self._failure(
                    name, f"{name.upper()} cannot contain PREV, NEXT, FIRST or LAST", "Use PREV(LAST(x))."
                )
            value, variable = (
                (None, self._navigation(inner, is_final=False).variable) if is_moved else self._value(inner)
            )
            return Navigation(value, variable, name == "last", offset, 0, is_final)
        if not is_moved:
            start = Navigation(*self._value(inner), is_final=is_final)
        else:
            start = self._navigation(inner, is_final=is_final)
        if is_moved and inner.name.lower() not in (f"{_MARK}first", f"{_MARK}last"):
            raise self._failure(name, f"{name.upper()} can contain FIRST or LAST only", "Use an offset: PREV(x, 2).")
        return start._replace(shift=-offset if name == "prev" else offset)

    def _offset(self, name: str, node: Any) -> int:
        from sqlglot import expressions as sql

        if not isinstance(node, sql.Literal) or not node.is_int or int(node.this) > SHIFT_MAX:
            raise self._failure(name, f"{name.upper()} needs a whole number from 0 to {SHIFT_MAX:,}")
        return int(node.this)

    def _fold(self, kind: str, node: Any, *, is_final: bool) -> Fold:
        from sqlglot import expressions as sql

        inner, is_distinct = node.this, isinstance(node.this, sql.Distinct)
        if is_distinct:
            if len(inner.expressions) != 1:
                raise self._failure("DISTINCT", "DISTINCT has one expression here")
            inner = inner.expressions[0]
        if isinstance(inner, sql.Star):
            return Fold(kind, None, None, False, is_final)
        if isinstance(inner, sql.Column) and isinstance(inner.this, sql.Star):
            return Fold(kind, None, self._variable(inner.table), False, is_final)
        if isinstance(inner, sql.Literal):
            return Fold(kind, inner.sql("databricks"), None, is_distinct, is_final)
        value, variable = self._value(inner)
        return Fold(kind, value, variable, is_distinct, is_final)

    def _value(self, node: Any) -> tuple[str, str | None]:
        """An expression over the columns of one row, and the variable that all its columns name."""
        from sqlglot import expressions as sql

        named, node = set[str | None](), node.copy()
        columns = [node] if isinstance(node, sql.Column) else list(node.find_all(sql.Column))
        for each in node.find_all(sql.Anonymous):
            if each.name.lower().startswith(_MARK):
                raise self._failure("", "Navigation and aggregates cannot contain each other here")
        for each in columns:
            named.add(self._variable(each.table) if each.table else None)
            own = self._columns.get(each.name.lower())
            if own is None:
                shown = ", ".join(self._columns.values())
                raise self._failure(each.name, f"There is no column {each.name}", f"Columns are {shown}.")
            each.set("table", None)
            each.set("this", sql.to_identifier(own, quoted=True))
        if len(named) > 1:
            raise self._failure("", "An expression that is moved or added up names one variable", "Split it.")
        return node.sql("databricks"), next(iter(named), None)

    def _variable(self, name: str) -> str:
        if name.lower() not in self._names:
            raise self._failure(name, f"There is no variable {name}", "Use one of PATTERN or SUBSET.")
        return name.lower()


def _rewritten(tokens: Sequence[PatternToken]) -> str:
    """The text with our functions under names that are nobody else's; FINAL f(x) becomes a function of f(x)."""
    words, at = list[str](), 0
    closing = dict[int, int]()
    depth = 0
    while at < len(tokens):
        token, after = tokens[at], tokens[at + 1].text if at + 1 < len(tokens) else ""
        if token.upper in _SIDES and at + 2 < len(tokens) and tokens[at + 2].text == "(":
            words.append(f"{_MARK}{token.upper.lower()}(")
            closing[depth] = closing.get(depth, 0) + 1
        elif token.upper in _OURS and after == "(":
            words.append(f"{_MARK}{token.upper.lower()}")
        else:
            words.append(token.text)
            depth += (token.text == "(") - (token.text == ")")
            if token.text == ")" and closing.get(depth):
                words.append(")" * closing.pop(depth))
        at += 1
    return " ".join(words)
