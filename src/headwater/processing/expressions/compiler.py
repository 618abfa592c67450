"""The compiler of expressions: from a tree of SQL to typed terms, with the casts that Spark would add."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, ClassVar

import pyarrow as pa
from sqlglot import expressions as sql

from headwater.model.ddl import parse_ddl, type_to_ddl
from headwater.model.errors import InvalidInput, InvalidSchema, Unsupported
from headwater.processing.expressions import arithmetic, choice, comparison, text, times
from headwater.processing.expressions.casts import cast
from headwater.processing.expressions.function_table import FUNCTIONS
from headwater.processing.expressions.interval import interval
from headwater.processing.expressions.parser import DIALECT, invalid, shown
from headwater.processing.expressions.term import Term, column, constant
from headwater.processing.expressions.type_rules import (
    BINARY,
    BOOLEAN,
    BYTE,
    DATE,
    DOUBLE,
    DURATION,
    INT,
    LONG,
    NULL,
    SHORT,
    STRING,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    as_decimal,
    common_type,
    is_decimal,
    is_fraction,
    is_number,
    wider_type,
)

_LITERALS = (sql.Literal, sql.Neg, sql.Paren, sql.TryCast)
COMPARISONS = {sql.EQ: "=", sql.LT: "<", sql.LTE: "<=", sql.GT: ">", sql.GTE: ">="}
ARITHMETIC = {sql.Add: "+", sql.Sub: "-", sql.Mul: "*", sql.Div: "/", sql.IntDiv: "div", sql.Mod: "%"}
PLAIN = (BOOLEAN, STRING, BINARY, BYTE, SHORT, INT, LONG, pa.float32(), DOUBLE, DATE, TIMESTAMP, TIMESTAMP_NTZ)
INTEGERS = (BYTE, SHORT, INT, LONG)
DEPTH_MAX = 200

_KNOWN_ARGS = {
    "this",
    "expression",
    "expressions",
    "is_string",
    "quoted",
    "typed",
    "safe",
    "to",
    "unit",
    "_type",
    "negate",
}
_KNOWN_ARGS |= {
    "ifs",
    "default",
    "true",
    "false",
    "low",
    "high",
    "position",
    "start",
    "length",
    "substr",
    "coalesce",
    "query",
}
"""What sqlglot's nodes say that is understood here. A node that says more means something else than it seems to."""


def compile_term(tree: Any, schema: pa.Schema, text_: str) -> Term:
    """The term of a tree over these columns; `text_` is what errors quote."""
    return _Compiler(schema, text_).term(tree)


class _Compiler:
    """Compiles the nodes of one expression."""

    def __init__(self, schema: pa.Schema, text_: str) -> None:
        self._fields = {field.name: field for field in schema}
        self._folded: dict[str, list[str]] = {}
        for name in schema.names:
            self._folded.setdefault(name.lower(), []).append(name)
        self._text = text_
        self._depth = 0

    def term(self, node: Any) -> Term:
        """The term of a node."""
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise invalid(self._text, f"it is nested more than {DEPTH_MAX} deep")
        try:
            return self._term(node)
        finally:
            self._depth -= 1

    def _term(self, node: Any) -> Term:
        kind = type(node)
        known = _KNOWN_ARGS | ({"negate"} if kind in (sql.Like, sql.ILike) else set())
        if any(value for name, value in node.args.items() if name not in known):
            raise self.unsupported(_named(node))
        if kind in COMPARISONS:
            return self._compared(COMPARISONS[kind], *self._sides(node))
        if kind in ARITHMETIC:
            return self._computed(ARITHMETIC[kind], node)
        build = self._BUILD.get(kind)
        if build is None:
            raise self.unsupported(_named(node))
        found = build(self, node)
        return found if kind in _LITERALS else replace(found, digits=None)

    def _sides(self, node: Any) -> tuple[Term, Term]:
        return self.term(node.this), self.term(node.expression)

    def unsupported(self, what: str) -> Unsupported:
        """The error for what the language does not have."""
        return Unsupported(
            f"The expression {shown(self._text)} uses {what}, which is not available here.",
            advice="The page docs/expressions.md lists what is available. Compute the rest in Spark first.",
        )

    def wrong(self, why: str) -> InvalidInput:
        """The error for what Spark would refuse too."""
        return invalid(self._text, why)

    # Leaves

    def _column(self, node: sql.Column) -> Term:
        if len(node.parts) > 1:
            raise self.unsupported(f"the name {node.sql(DIALECT)} with a dot")
        names = self._folded.get(node.name.lower(), [])
        if len(names) > 1 and node.name in names:
            names = [node.name]
        if len(names) != 1:
            why = f"the column {node.name!r} is ambiguous" if names else f"the column {node.name!r} does not exist"
            raise InvalidInput(
                f"The expression {shown(self._text)} is not valid: {why}.",
                advice=f"Its columns are {', '.join(self._fields)}.",
            )
        type_ = self._fields[names[0]].type
        if type_ not in PLAIN and not is_decimal(type_):
            raise self.unsupported(f"the column {names[0]!r} of type {type_to_ddl(type_)}")
        return column(names[0], type_)

    def _literal(self, node: sql.Literal) -> Term:
        return constant(node.this, STRING) if node.is_string else self._number(str(node.this))

    def _number(self, digits: str) -> Term:
        if "e" in digits.lower():
            return constant(float(digits), DOUBLE)
        value = Decimal(digits)
        exponent = -int(value.as_tuple().exponent)
        if exponent <= 0 and "." not in digits and -(2**63) <= value < 2**63:
            type_ = INT if -(2**31) <= value < 2**31 else LONG
            return constant(int(value), type_, digits=len(str(abs(int(value)))))
        count = max(len(value.as_tuple().digits), exponent)
        if count > 38:
            raise self.wrong(f"the number {digits} has more than 38 digits")
        return constant(value, as_decimal(pa.decimal128(count, max(0, exponent))))

    def _negated_number(self, node: sql.Neg) -> Term:
        inner = node.this
        if isinstance(inner, sql.Literal) and not inner.is_string:
            return self._number(f"-{inner.this}")
        if (
            isinstance(inner, (sql.Cast, sql.TryCast))
            and isinstance(inner.this, sql.Literal)
            and not inner.this.is_string
        ):
            value = self._number(f"-{inner.this.this}")
            cast_value = self._cast_to(value, self._type(inner.args["to"]))
            return replace(cast_value, digits=value.digits if self._has_suffix(inner) else None)
        term = self.term(inner)
        if term.type == DURATION or term.months is not None:
            return times.negative(term)
        return arithmetic.negative(self.number(term, "-"))

    # Operators

    def _compared(self, name: str, left: Term, right: Term) -> Term:
        return comparison.compared(name, *self._matched(left, right, name))

    def _matched(self, left: Term, right: Term, name: str) -> tuple[Term, Term]:
        type_ = self._shared(left, right)
        if type_ is None or left.months is not None or right.months is not None:
            raise self.wrong(f"{_shown(left)} and {_shown(right)} cannot be operands of {name}")
        return self.as_type(left, type_), self.as_type(right, type_)

    def _shared(self, left: Term, right: Term) -> pa.DataType | None:
        """The type of two operands; a literal beside a decimal has its own digits."""
        left_type, right_type = left.type, right.type
        if is_decimal(left_type) and right.digits is not None:
            right_type = as_decimal(right_type, right.digits)
        if is_decimal(right_type) and left.digits is not None:
            left_type = as_decimal(left_type, left.digits)
        return wider_type(left_type, right_type)

    def _computed(self, name: str, node: Any) -> Term:
        left, right = self._sides(node)
        if times.is_temporal(left) or times.is_temporal(right):
            return times.computed(self, name, left, right)
        return self.computed(name, left, right)

    def computed(self, name: str, left: Term, right: Term, *, tries: bool = False) -> Term:
        """Arithmetic on two numbers; `tries` gives null where it would fail."""
        for term in (left, right):
            if not is_number(term.type) and term.type not in (STRING, NULL):
                raise self.wrong(f"{_shown(left)} and {_shown(right)} cannot be operands of {name}")
        if left.type == NULL and right.type == NULL:
            left = right = constant(None, DOUBLE if name == "/" else INT)
        type_ = self._shared(left, right)
        assert type_ is not None
        if type_ == STRING:
            type_ = DOUBLE
        if is_decimal(type_):
            left, right = self._decimal_operand(left, type_), self._decimal_operand(right, type_)
        else:
            if name == "div" and is_fraction(type_):
                raise self.wrong(f"{_shown(left)} and {_shown(right)} cannot be operands of DIV")
            type_ = DOUBLE if name == "/" else LONG if name == "div" else type_
            left, right = self.as_type(left, type_), self.as_type(right, type_)
        match name:
            case "/":
                return arithmetic.divided(left, right, tries=tries)
            case "div":
                return arithmetic.whole_quotient(left, right)
            case "%" | "pmod":
                return arithmetic.remainder(left, right, positive=name == "pmod", tries=tries)
            case _:
                return arithmetic.arithmetic(name, left, right, tries=tries)

    def _decimal_operand(self, term: Term, beside: pa.DataType) -> Term:
        if is_decimal(term.type):
            return term
        return self.as_type(term, beside if term.type == NULL else as_decimal(term.type, term.digits))

    def _null_safe(self, node: Any) -> Term:
        equal = comparison.null_safe(*self._matched(*self._sides(node), "<=>"))
        return choice.negated(equal) if isinstance(node, sql.NullSafeNEQ) else equal

    def _unequal(self, node: sql.NEQ) -> Term:
        return choice.negated(self._compared("=", *self._sides(node)))

    def _both(self, node: sql.And) -> Term:
        left, right = self._sides(node)
        return choice.both(self.truth(left, "AND"), self.truth(right, "AND"))

    def _either(self, node: sql.Or) -> Term:
        left, right = self._sides(node)
        return choice.either(self.truth(left, "OR"), self.truth(right, "OR"))

    def _not(self, node: sql.Not) -> Term:
        return choice.negated(self.truth(self.term(node.this), "NOT"))

    def _is(self, node: sql.Is) -> Term:
        if isinstance(node.expression, sql.Boolean):
            return comparison.is_truth(self.truth(self.term(node.this), "IS"), bool(node.expression.this))
        if isinstance(node.expression, sql.Not):
            return choice.negated(self._is(sql.Is(this=node.this, expression=node.expression.this)))
        if not isinstance(node.expression, sql.Null):
            raise self.unsupported(f"IS {node.expression.sql(DIALECT)}")
        return comparison.is_null(self.term(node.this))

    def _between(self, node: sql.Between) -> Term:
        value, low, high = self.term(node.this), self.term(node.args["low"]), self.term(node.args["high"])
        return choice.both(self._compared(">=", value, low), self._compared("<=", value, high))

    def _in(self, node: sql.In) -> Term:
        if node.args.get("query") is not None or node.args.get("unnest") is not None or not node.expressions:
            raise self.unsupported("IN with a query")
        terms = self.alike([self.term(node.this), *map(self.term, node.expressions)], "IN")
        return comparison.among(terms[0], terms[1:])

    def _case(self, node: sql.Case) -> Term:
        subject = None if node.this is None else self.term(node.this)
        conditions, values = [], []
        for each in node.args["ifs"]:
            condition = self.term(each.this)
            conditions.append(
                self.truth(condition, "WHEN") if subject is None else self._compared("=", subject, condition)
            )
            values.append(self.term(each.args["true"]))
        default = node.args.get("default")
        values = self.alike([*values, constant(None, NULL) if default is None else self.term(default)], "CASE")
        return choice.cases(values[0].type, list(zip(conditions, values, strict=False)), values[-1])

    def _if(self, node: sql.If) -> Term:
        default = node.args.get("false")
        if default is None:
            raise self.wrong("IF needs three arguments")
        values = self.alike([self.term(node.args["true"]), self.term(default)], "IF")
        return choice.cases(values[0].type, [(self.truth(self.term(node.this), "IF"), values[0])], values[1])

    def _cast(self, node: Any) -> Term:
        if isinstance(node.this, sql.Literal) and not node.this.is_string and self._has_suffix(node):
            value = self._number(str(node.this.this))
            return replace(self._cast_to(value, self._type(node.args["to"])), digits=value.digits)
        found = self._cast_to(self.term(node.this), self._type(node.args["to"]), tries=bool(node.args.get("safe")))
        return replace(found, digits=None)

    def _has_suffix(self, node: Any) -> bool:
        """Whether it is a literal such as `5L`, which sqlglot gives as a cast."""
        return re.search(rf"(?i)(?<!\w){re.escape(str(node.this.this))}[LSY](?!\w)", self._text) is not None

    def _cast_to(self, term: Term, type_: pa.DataType, *, tries: bool = False) -> Term:
        found = cast(term, type_, tries=tries) if term.type in (type_, NULL) or term.type != DURATION else None
        if found is None:
            raise self.unsupported(f"a cast of {_shown(term)} to {type_to_ddl(type_)}")
        return found

    def _type(self, node: Any) -> pa.DataType:
        name = node.sql(DIALECT)
        if name.upper() == "DECIMAL":
            return pa.decimal128(10, 0)
        try:
            return parse_ddl(f"x {name}").field(0).type
        except InvalidSchema:
            raise self.unsupported(f"the type {name}") from None

    def _like(self, node: Any, escape: str = "\\") -> Term:
        folds = isinstance(node, sql.ILike)
        found = text.like(self, self.term(node.this), self.term(node.expression), escape, folds=folds)
        return choice.negated(found) if node.args.get("negate") else found

    def _escaped(self, node: sql.Escape) -> Term:
        escape = node.expression
        if not isinstance(node.this, (sql.Like, sql.ILike)) or not escape.is_string or len(escape.this) != 1:
            raise self.wrong("ESCAPE needs a text of one character after LIKE")
        return self._like(node.this, escape.this)

    def _joined(self, node: Any) -> Term:
        return self.call("concat", node.expressions if isinstance(node, sql.Concat) else [node.this, node.expression])

    def _trimmed(self, node: sql.Trim) -> Term:
        side = str(node.args.get("position") or "BOTH").upper()
        name = {"LEADING": "ltrim", "TRAILING": "rtrim", "BOTH": "trim"}[side]
        characters = node.args.get("expression")
        return text.trimmed(self, name, self.term(node.this), None if characters is None else self.term(characters))

    def _function(self, node: sql.Anonymous) -> Term:
        if str(node.this).lower() in times.DIFFERENCES and len(node.expressions) == 3:
            unit, start, end = node.expressions
            return times.difference(self, unit.name.lower(), self.term(start), self.term(end))
        return self.call(str(node.this).lower(), node.expressions)

    def call(self, name: str, nodes: Sequence[Any]) -> Term:
        """The term of a function."""
        function = FUNCTIONS.get(name)
        if function is None:
            raise self.unsupported(f"the function {name}")
        if not function.least <= len(nodes) <= function.most:
            raise self.wrong(f"{name} has {function.takes} arguments, not {len(nodes)}")
        return function.build(self, [self.term(node) for node in nodes])

    def _extracted(self, node: sql.Extract) -> Term:
        return times.extracted(self, node.this.name.lower(), self.term(node.expression))

    # Conversions

    def as_type(self, term: Term, type_: pa.DataType) -> Term:
        """The term as Spark converts it where an operation wants another type."""
        return self._cast_to(term, type_)

    def alike(self, terms: Sequence[Term], name: str) -> list[Term]:
        """The terms with the type that they share."""
        type_ = common_type([term.type for term in terms])
        if type_ is None or any(term.months is not None for term in terms):
            raise self.wrong(f"the values of {name} share no type: {', '.join(map(_shown, terms))}")
        return [self.as_type(term, type_) for term in terms]

    def truth(self, term: Term, name: str) -> Term:
        """An operand that has to be BOOLEAN."""
        if term.type not in (BOOLEAN, NULL):
            raise self.wrong(f"{name} needs BOOLEAN, not {_shown(term)}")
        return self.as_type(term, BOOLEAN)

    def number(self, term: Term, name: str) -> Term:
        """An operand that has to be a number; a text is taken as DOUBLE."""
        if term.type in (STRING, NULL):
            return self.as_type(term, DOUBLE)
        if not is_number(term.type):
            raise self.wrong(f"{name} needs a number, not {_shown(term)}")
        return term

    def double(self, term: Term, name: str) -> Term:
        """An operand that is taken as DOUBLE."""
        return self.as_type(self.number(term, name), DOUBLE)

    def integer(self, term: Term, name: str, type_: pa.DataType = INT) -> Term:
        """An operand that has to be an integer of at most this size."""
        if term.type in (STRING, NULL) or term.type in INTEGERS:
            return self.as_type(term, type_)
        if is_fraction(term.type) or is_decimal(term.type):
            return self.as_type(term, type_)
        raise self.wrong(f"{name} needs {type_to_ddl(type_)}, not {_shown(term)}")

    def text(self, term: Term, name: str) -> Term:
        """An operand that is taken as a text."""
        if term.type == BINARY or term.months is not None or term.type == DURATION:
            raise self.unsupported(f"{name} of {_shown(term)}")
        return self.as_type(term, STRING)

    def moment(self, term: Term, name: str) -> Term:
        """An operand that is taken as TIMESTAMP."""
        if term.type not in (STRING, NULL, DATE, TIMESTAMP, TIMESTAMP_NTZ):
            raise self.wrong(f"{name} needs TIMESTAMP, not {_shown(term)}")
        return self.as_type(term, TIMESTAMP)

    def day(self, term: Term, name: str) -> Term:
        """An operand that is taken as DATE."""
        if term.type not in (STRING, NULL, DATE, TIMESTAMP, TIMESTAMP_NTZ):
            raise self.wrong(f"{name} needs DATE, not {_shown(term)}")
        return self.as_type(term, DATE)

    _BUILD: ClassVar[dict[Any, Callable[[Any, Any], Term]]] = {
        sql.Paren: lambda self, node: self.term(node.this),
        sql.Column: _column,
        sql.Literal: _literal,
        sql.RawString: lambda self, node: constant(node.this, STRING),
        sql.HexString: lambda self, node: constant(bytes.fromhex(node.this), BINARY),
        sql.Boolean: lambda self, node: constant(bool(node.this), BOOLEAN),
        sql.Null: lambda self, node: constant(None, NULL),
        sql.Neg: _negated_number,
        sql.NEQ: _unequal,
        sql.NullSafeEQ: _null_safe,
        sql.NullSafeNEQ: _null_safe,
        sql.And: _both,
        sql.Or: _either,
        sql.Not: _not,
        sql.Is: _is,
        sql.Between: _between,
        sql.In: _in,
        sql.Case: _case,
        sql.If: _if,
        sql.Cast: _cast,
        sql.TryCast: _cast,
        sql.Like: _like,
        sql.ILike: _like,
        sql.Escape: _escaped,
        sql.Concat: _joined,
        sql.DPipe: _joined,
        sql.Trim: _trimmed,
        sql.Substring: lambda self, node: self.call(
            "substring",
            [each for each in (node.this, node.args.get("start"), node.args.get("length")) if each is not None],
        ),
        sql.StrPosition: lambda self, node: self.call("locate", [node.args["substr"], node.this]),
        sql.Extract: _extracted,
        sql.Anonymous: _function,
        sql.Interval: interval,
    }


def _shown(term: Term) -> str:
    return "an interval" if term.months is not None or term.type == DURATION else type_to_ddl(term.type)


def _named(node: Any) -> str:
    """What errors call a node that the language does not have."""
    if isinstance(node, sql.Window):
        return f"the window function {node.this.sql(DIALECT).partition('(')[0].lower()}"
    if isinstance(node, (sql.Query, sql.Exists)):
        return "a query"
    if isinstance(node, sql.RegexpLike):
        return "RLIKE"
    if isinstance(node, sql.Func):
        return f"the function {node.sql(DIALECT).partition('(')[0].lower()}"
    return f"{node.sql(DIALECT)!r:.80}"
