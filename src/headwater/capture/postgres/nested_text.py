"""The text of arrays and composites of PostgreSQL, taken apart into the texts of what is inside them.

    {1,NULL,"a \\"quoted\\" one","{}"}      an array; NULL without quotes is null; {{1,2},{3,4}} has two dimensions; [0:1]={1,2} has bounds
    (1,,"a ""quoted"" one",)                a composite; an empty part without quotes is null

Arrays without quotes, of one dimension, are split by Arrow; only others are read character by character. Functions only, no state.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_HARD = r'["\\]|^\[|^.+\{'
"""What Arrow cannot split: quotes, bounds, dimensions."""

_ELEMENT = re.compile(r'"((?:[^"\\]|\\.)*)"|([^{},"]+)', re.DOTALL)
_PART = re.compile(r'"((?:[^"\\]|""|\\.)*)"|([^,()"]*)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED_PART = re.compile(r'\\(.)|"(")', re.DOTALL)


def array_texts(column: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int32]]:
    """The elements of all arrays of a column as text, and the offsets of each array among them; a null has none."""
    column = pc.fill_null(column, "{}")
    if len(column) and pc.any(pc.match_substring_regex(column, _HARD)).as_py():
        lists = [elements(text) for text in column.to_pylist()]
        values = pa.array([value for found in lists for value in found], pa.string())
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    else:
        inside = pc.utf8_trim(column, "{}")
        split = pc.split_pattern(inside, ",")
        empty = pc.equal(inside, "")
        values = pc.list_flatten(pc.if_else(empty, pa.scalar([], split.type), split))
        values = pc.if_else(pc.equal(values, "NULL"), None, values)
        lengths = pc.if_else(empty, 0, pc.list_value_length(split)).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return values, offsets


def composite_texts(column: pa.Array, width: int) -> list[pa.Array]:
    """The parts of all composites of a column as text; parts that a value does not have are null, more than `width` are left out."""
    rows = [[None] * width if text is None else _fitted(parts(text), width) for text in column.to_pylist()]
    return [pa.array([row[at] for row in rows], pa.string()) for at in range(width)]


def elements(text: str) -> list[str | None]:
    """The elements of one array, of all its dimensions."""
    found: list[str | None] = []
    body = text.partition("=")[2] if text.startswith("[") else text
    for match in _ELEMENT.finditer(body):
        if match[2] is None:
            found.append(_ESCAPED.sub(r"\1", match[1]))
        else:
            found.append(None if match[2] == "NULL" else _ESCAPED.sub(r"\1", match[2]))
    return found


def parts(text: str) -> list[str | None]:
    """The parts of one composite."""
    found: list[str | None] = []
    at, end = 1, len(text) - 1
    while at <= end:
        match = _PART.match(text, at, end)
        assert match is not None, "the pattern matches nothing, too"
        found.append((match[2] or None) if match[1] is None else _ESCAPED_PART.sub(r"\1\2", match[1]))
        at = match.end() + 1
    return found


def _fitted(values: list[str | None], width: int) -> list[str | None]:
    return (values + [None] * (width - len(values)))[:width]
