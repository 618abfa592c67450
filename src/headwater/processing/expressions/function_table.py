"""The table of functions: every function of the language by each of its names in Spark."""

from __future__ import annotations

from headwater.processing.expressions import choice, comparison
from headwater.processing.expressions.mathematics import MATHEMATICS
from headwater.processing.expressions.operands import Function, Operands
from headwater.processing.expressions.term import Term, constant
from headwater.processing.expressions.text import TEXT
from headwater.processing.expressions.times import TIMES

ARGUMENTS_MAX = 100


def _coalesced(operands: Operands, args: list[Term]) -> Term:
    terms = operands.alike(args, "coalesce")
    return choice.first_valid(terms[0].type, terms)


def _second_if_valid(operands: Operands, args: list[Term]) -> Term:
    second, third = operands.alike(args[1:], "nvl2")
    return choice.cases(second.type, [(choice.negated(comparison.is_null(args[0])), second)], third)


def _null_if_equal(operands: Operands, args: list[Term]) -> Term:
    one, other = operands.alike(args, "nullif")
    nothing = constant(None, args[0].type)
    return choice.cases(args[0].type, [(comparison.compared("=", one, other), nothing)], args[0])


def _greatest(operands: Operands, args: list[Term]) -> Term:
    terms = operands.alike(args, "greatest")
    return choice.extreme(">", terms[0].type, terms)


def _least(operands: Operands, args: list[Term]) -> Term:
    terms = operands.alike(args, "least")
    return choice.extreme("<", terms[0].type, terms)


CHOICES = {
    "coalesce": Function(_coalesced, 1, ARGUMENTS_MAX),
    "nvl": Function(_coalesced, 2),
    "ifnull": Function(_coalesced, 2),
    "nvl2": Function(_second_if_valid, 3),
    "nullif": Function(_null_if_equal, 2),
    "greatest": Function(_greatest, 2, ARGUMENTS_MAX),
    "least": Function(_least, 2, ARGUMENTS_MAX),
    "isnull": Function(lambda operands, args: comparison.is_null(args[0]), 1),
    "isnotnull": Function(lambda operands, args: choice.negated(comparison.is_null(args[0])), 1),
}

FUNCTIONS: dict[str, Function] = {**CHOICES, **MATHEMATICS, **TEXT, **TIMES}
