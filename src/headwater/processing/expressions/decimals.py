"""Decimals as integers: the digits of a DECIMAL column without its point, and back, with Spark's rounding (half away from zero)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from headwater.processing.expressions.term import Values, anywhere, array_of, arrayed, valid_of

INT64_DIGITS = 18
"""So many digits fit into 64 bits, with one to spare."""


def digits_of(values: Values) -> np.ndarray:
    """The unscaled integers of a decimal array, 0 where it is null: 64 bits for at most 18 digits, else Python's integers."""
    if isinstance(values, pa.Scalar):
        values = arrayed(values, 1)
    halves = np.frombuffer(values.buffers()[1], np.uint64) if len(values) else np.zeros(0, np.uint64)
    halves = halves[2 * values.offset : 2 * (values.offset + len(values))]
    low, high = halves[::2], halves[1::2].view(np.int64)
    valid = valid_of(values, len(values))
    if values.type.precision <= INT64_DIGITS:
        found = low.view(np.int64)
        return found if valid is None else np.where(valid, found, 0)
    found = high.astype(object) * 2**64 + low.astype(object)
    return found if valid is None else np.where(valid, found, 0)


def rescaled(digits: Any, scale: int, wanted: int) -> Any:
    """The same numbers with another number of digits after the point."""
    if wanted >= scale:
        return digits * 10 ** (wanted - scale) if wanted > scale else digits
    by = 10 ** (scale - wanted)
    if by >= 2**62:
        digits = np.asarray(digits).astype(object)
    size = abs(digits)
    rounded = size // by
    rounded = rounded + (size - rounded * by >= (by + 1) // 2)
    return np.where(digits < 0, -rounded, rounded)


def from_digits(digits: Any, type_: pa.DataType, *args: Values) -> tuple[pa.Array, Any]:
    """The decimal array of unscaled integers, null where an argument is; and the mask of those with too many digits."""
    digits = np.asarray(digits)
    limit = 10**type_.precision
    if digits.dtype != object:
        failed = (abs(digits) >= limit) if limit < 2**63 else np.zeros(len(digits), bool)
        halves = np.empty((len(digits), 2), np.int64)
        halves[:, 0] = digits
        halves[:, 1] = digits >> 63
    else:
        failed = np.asarray(abs(digits) >= limit, bool)
        safe = np.where(failed, 0, digits)
        halves = np.empty((len(digits), 2), np.int64)
        halves[:, 0] = (safe % 2**64).astype(np.uint64).view(np.int64)
        halves[:, 1] = (safe // 2**64).astype(np.int64)
    present = array_of(np.ones(len(digits), bool), pa.bool_(), *args)
    validity = present.buffers()[0] if present.null_count else None
    found = pa.Array.from_buffers(type_, len(digits), [validity, pa.py_buffer(halves)])
    return found, anywhere(failed, *args)
