"""A view's definition: what its rows are, what identifies one of them, and how batches change them.

A definition never changes once rows were made by it. Another schema, key, mode or code is another generation, which is
built beside the old one and swapped in; `check_definition` says which of both it is, and why. Order and limit only say how a
top-N is read, so they may change at any time.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import msgspec
import pyarrow as pa

from headwater.log.port.topic import NAME_CHARACTERS_MAX, check_name
from headwater.model.errors import InvalidInput
from headwater.model.schema import SchemaLike, schema_from_json, schema_to_json, to_arrow_schema, to_ddl

Mode = Literal["update", "complete", "append"]
"""What a batch is: rows that are new or changed by key, the whole result, or rows that are only added."""

NAME_CHARACTERS_LEFT = 20
"""Room behind a view's name for `.changes` and the generation."""


class ViewDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A view, made by `define_view`. A name in `order` with `-` in front is descending; nulls come last either way."""

    name: str
    schema: pa.Schema
    key: tuple[str, ...]
    mode: Mode = "update"
    order: tuple[str, ...] = ()
    limit: int | None = None
    fingerprint: str = ""
    generation: int = 1

    @property
    def changes(self) -> str:
        """The topic of its changes: `<view>.changes`, with the generation behind it from the second on."""
        return f"{self.name}.changes" if self.generation == 1 else f"{self.name}.changes.{self.generation}"

    def to_json(self) -> str:
        """The definition as text, for `from_json`."""
        plain = {field: getattr(self, field) for field in self.__struct_fields__ if field != "schema"}
        return msgspec.json.encode({**plain, "schema": schema_to_json(self.schema)}).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> ViewDefinition:
        """The definition that `to_json` gave."""
        plain = msgspec.json.decode(text)
        plain |= {"key": tuple(plain["key"]), "order": tuple(plain["order"])}
        return cls(**{**plain, "schema": schema_from_json(plain["schema"])})


class Verdict(msgspec.Struct, frozen=True):
    """Whether the rows that are there can be gone on with; if not, `why` is a sentence that says what changed."""

    same: bool
    why: str = ""


def define_view(
    name: str,
    schema: SchemaLike,
    *,
    key: str | Sequence[str] = (),
    mode: Mode = "update",
    order: str | Sequence[str] = (),
    limit: int | None = None,
    code: Callable[..., Any] | str | None = None,
) -> ViewDefinition:
    """A definition that fits together; `code` is the function or SQL that makes the rows.

    Without a key, rows can only be added (`mode="append"`).
    """
    check_name(name, of="view")
    if len(name) > NAME_CHARACTERS_MAX - NAME_CHARACTERS_LEFT:
        raise InvalidInput(
            f"The name {name[:40]}… is too long for the name of a view.", advice="Use at most 180 characters."
        )
    columns = to_arrow_schema(schema)
    keys = (key,) if isinstance(key, str) else tuple(key)
    if mode not in get_args(Mode):
        raise InvalidInput(
            f"View {name!r} has the unknown mode {mode!r}.", advice='Use "update", "complete" or "append".'
        )
    if not keys and mode != "append":
        raise InvalidInput(
            f'View {name!r} has no key, which mode="{mode}" requires.',
            advice='Declare its key columns, or use mode="append".',
        )
    for column in keys:
        _check_column(name, columns, column, role="key")
        if pa.types.is_nested(columns.field(column).type):
            raise InvalidInput(
                f"View {name!r}: Column {column!r} has the type {columns.field(column).type}, which a key cannot have.",
                advice="Use a column with a scalar type, such as a field of the column.",
            )
    return ViewDefinition(
        name=name,
        schema=columns,
        key=keys,
        mode=mode,
        order=check_order(name, columns, order),
        limit=check_limit(limit),
        fingerprint="" if code is None else code_fingerprint(code),
    )


def check_order(name: str, schema: pa.Schema, order: str | Sequence[str] | None) -> tuple[str, ...]:
    """The columns to order by, each of them there and of a type that has an order."""
    columns = () if order is None else (order,) if isinstance(order, str) else tuple(order)
    for column in columns:
        plain = column.removeprefix("-")
        _check_column(name, schema, plain, role="order")
        if pa.types.is_nested(schema.field(plain).type):
            raise InvalidInput(
                f"View {name!r}: Column {plain!r} has a type without an order.",
                advice="Order by columns with scalar types.",
            )
    return columns


def check_limit(limit: object) -> int | None:
    """How many rows at most: None for all."""
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1):
        return limit
    raise InvalidInput(
        f"The limit {limit!r} is not a positive number.", advice="Use a limit of at least 1, or leave it out."
    )


def check_definition(stored: ViewDefinition, new: ViewDefinition) -> Verdict:
    """Whether a view that was made by one definition can be gone on with by another, or must be built anew."""
    what = []
    if stored.schema != new.schema:
        what.append(f"its columns were {to_ddl(stored.schema)} and are {to_ddl(new.schema)}")
    if stored.key != new.key:
        what.append(f"its key was ({', '.join(stored.key)}) and is ({', '.join(new.key)})")
    if stored.mode != new.mode:
        what.append(f"its mode was {stored.mode} and is {new.mode}")
    if stored.fingerprint != new.fingerprint:
        what.append("the code that computes its rows has changed")
    if not what:
        return Verdict(same=True)
    return Verdict(same=False, why=f"View {new.name!r} must be rebuilt: {'; '.join(what)}.")


def code_fingerprint(code: Callable[..., Any] | str) -> str:
    """What changes when the code does: of a function its syntax tree, without decorators, docstring, comments and layout.

    Functions that it calls are not part of it.
    """
    if isinstance(code, str):
        return _digest(" ".join(code.split()))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        compiled = getattr(code, "__code__", None)
        shape = (compiled.co_code, compiled.co_names, compiled.co_consts) if compiled else code
        return _digest(repr(shape))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return _digest(ast.dump(tree))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_column(view: str, schema: pa.Schema, column: object, *, role: str) -> None:
    if column not in schema.names:
        raise InvalidInput(
            f"View {view!r} has no column {column!r} for its {role}.",
            advice=f"Its columns are: {', '.join(schema.names)}.",
        )
