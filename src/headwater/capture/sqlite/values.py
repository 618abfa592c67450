"""Values of SQLite as columns of the log.

SQLite may hold any kind of value in any column. One that the column's type in the log cannot hold exactly is null there, and stands in the
event's header `misfit.<column>` as an SQL literal (`'abc'`, `1.5`, `x'00ff'`): nothing is lost, nothing stops, and it is counted.
Whole numbers and floats in a STRING column are their text; text in a BINARY column is its UTF-8. In a key column nothing may be amiss:
there a misfit, like null, has no place in the log (`KeyMisfit`).

No loop over rows unless some value is amiss. Functions only, no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.model.schema import HEADERS

_EXACT = 1 << 53
_NONE = type(None)
_FITTING: dict[pa.DataType, set[type]] = {
    pa.int64(): {int, _NONE},
    pa.float64(): {float, int, _NONE},
    pa.string(): {str, _NONE},
    pa.binary(): {bytes, _NONE},
}

Misfits = dict[int, dict[str, bytes]]
"""By row: what did not fit, by the header that it stands in."""


class KeyMisfit(Exception):
    """A key that the log cannot have: null, or of another kind than its column was declared with."""

    def __init__(self, column: str, value: Any) -> None:
        super().__init__(column, value)
        self.column = column
        self.literal = literal(value)


def to_columns(
    values: Sequence[Sequence[Any]], schema: pa.Schema, misfits: Misfits | None = None, *, optional: bool = False
) -> list[pa.Array]:
    """The columns of a schema from the values of each; what does not fit is noted in `misfits`.

    With `optional` a whole row may be missing: all its values are null, those of its key too.
    """
    columns = []
    for field, column in zip(schema, values, strict=True):
        found = _column(column, field, misfits)
        if not field.nullable and not optional and found.null_count:
            raise KeyMisfit(field.name, None)
        columns.append(found)
    return columns


def headers_column(misfits: Misfits, count: int) -> pa.Array | None:
    """The events' headers; None where everything fits."""
    return pa.array([misfits.get(row) for row in range(count)], HEADERS.type) if misfits else None


def literal(value: Any) -> str:
    """A value as SQL writes it."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, str):
        if _is_broken(value):
            return f"CAST(x'{value.encode('utf-8', 'surrogateescape').hex()}' AS TEXT)"
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, float) and math.isinf(value):
        return "9e999" if value > 0 else "-9e999"
    return repr(value)


def _column(values: Sequence[Any], field: pa.Field, misfits: Misfits | None) -> pa.Array:
    type_ = field.type
    fitting = _FITTING.get(type_)
    if fitting is not None and fitting.issuperset(map(type, values)):
        try:
            return pa.array(values, type_)
        except (pa.ArrowInvalid, UnicodeEncodeError):
            pass
    if pa.types.is_boolean(type_) and {0, 1, None}.issuperset(values) and {int, _NONE}.issuperset(map(type, values)):
        return pa.array(values, pa.int8()).cast(type_)
    fitted = [_fitted(value, type_) for value in values]
    if misfits is not None:
        amiss = np.flatnonzero([new is None and old is not None for new, old in zip(fitted, values, strict=True)])
        if len(amiss) and not field.nullable:
            raise KeyMisfit(field.name, values[int(amiss[0])])
        for row in amiss.tolist():
            misfits.setdefault(row, {})[f"misfit.{field.name}"] = literal(values[row]).encode("utf-8")
    return pa.array(fitted, type_)


def _fitted(value: Any, type_: pa.DataType) -> Any:
    """The value as the type holds it; None where it cannot."""
    if pa.types.is_boolean(type_):
        return bool(value) if isinstance(value, int) and value in (0, 1) else None
    if pa.types.is_int64(type_):
        return value if isinstance(value, int) else None
    if pa.types.is_floating(type_):
        return float(value) if isinstance(value, float) or (isinstance(value, int) and abs(value) <= _EXACT) else None
    if pa.types.is_binary(type_):
        return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else _only(value, bytes)
    if isinstance(value, str):
        return None if _is_broken(value) else value
    return repr(value) if isinstance(value, (int, float)) else None


def _only(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else None


def _is_broken(text: str) -> bool:
    """Whether a text was no UTF-8 in the database."""
    return any("\udc80" <= char <= "\udcff" for char in text)
