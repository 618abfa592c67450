"""The parser of expressions: Spark SQL text to a sqlglot tree, in which every function keeps the name that the text has.

sqlglot's own Spark dialect maps functions to classes and rewrites some of them. Here a function is `Anonymous` with its name and its
arguments, so that the language has one table of functions. A tree that another part of Headwater brings is written as Spark SQL and
read again: what is compiled is always the text that Spark would get.
"""

from __future__ import annotations

from typing import Any, ClassVar

import sqlglot
from sqlglot import expressions as sql
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError
from sqlglot.parsers.spark import SparkParser

from headwater.model.errors import InvalidInput

DIALECT = "spark"
SQL_BYTES_MAX = 1 << 20

_SPECIAL = ("CAST", "TRY_CAST", "EXTRACT", "TRIM", "SUBSTRING", "POSITION")
ADVICE = "Write a Spark SQL expression over the columns of one row, such as \"amount > 10 AND page LIKE '/shop/%'\"."


class RowDialect(Spark):
    """Spark's dialect without the classes of its functions."""

    class Parser(SparkParser):
        """The parser of that dialect."""

        FUNCTIONS: ClassVar[dict[str, Any]] = {}
        FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {name: SparkParser.FUNCTION_PARSERS[name] for name in _SPECIAL}


def sql_of(text_or_node: str | sql.Expression) -> str:
    """The Spark SQL text of an expression."""
    return text_or_node if isinstance(text_or_node, str) else text_or_node.sql(DIALECT)


def parse(text: str) -> Any:
    """The tree of an expression; `InvalidInput` says where the text is wrong."""
    if len(text) > SQL_BYTES_MAX:
        raise InvalidInput(
            f"An expression of {len(text):,} characters is too long.", advice=f"At most {SQL_BYTES_MAX:,} are allowed."
        )
    try:
        trees = sqlglot.parse(text, dialect=RowDialect)
    except SqlglotError as error:
        raise invalid(text, f"it is not understood {place(error)}") from None
    except RecursionError:
        raise invalid(text, "it is nested too deeply") from None
    if len(trees) != 1 or trees[0] is None:
        raise invalid(text, "it is empty" if not trees or trees[0] is None else "it has a semicolon")
    return trees[0]


def place(error: Any) -> str:
    """Where a text is wrong, as sqlglot found it."""
    details = (getattr(error, "errors", None) or [{}])[0]
    if not details.get("highlight"):
        return "because its quotes or brackets do not match"
    return f"at {details['highlight']!r}, line {details['line']}, column {details['col']}"


def invalid(text: str, why: str) -> InvalidInput:
    """The error of an expression that the language does not have."""
    return InvalidInput(f"The expression {shown(text)} is not valid: {why}.", advice=ADVICE)


def shown(text: str) -> str:
    """A text as errors show it: its beginning."""
    return f"{text!r:.200}"
