"""Spark's `xxhash64` over Arrow columns: a key has the same hashes in a task as in Spark's JVM.

Spark hashes the columns of a row one after the other, each with the hash so far as its seed, 42 at first, and leaves nulls out. A column
is XXH64 over the bytes of its values: eight for longs and times, four for what is shorter, all of a text. Here the values of equal length
are hashed at once, as words of a matrix.

Functions only, no state: safe from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

SEED = 42
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
_STRIPE = 32
_BLOCK_ROWS = 16_384
_Words = Any
"""A NumPy array of unsigned 64-bit numbers."""


def is_hashable(kind: pa.DataType) -> bool:
    """Whether columns of a type can be hashed here."""
    return _width(kind) is not None or pa.types.is_string(kind) or pa.types.is_binary(kind)


def hashes_of(columns: Sequence[pa.Array]) -> tuple[_Words, _Words]:
    """The two hashes by which operators know a key (see `operator.hashes`), as signed numbers; null is a value, too."""
    count = len(columns[0])
    first = np.full(count, SEED, np.uint64)
    found = []
    for hashed in (first, _fixed(np.full(count, 1, np.uint64), 4, first)):
        for column in columns:
            is_null = column.is_null().to_numpy(zero_copy_only=False)
            hashed = _column(column, _fixed(is_null.astype(np.uint64), 4, hashed), is_null)
        found.append(hashed.view(np.int64))
    return found[0], found[1]


def hashes_of_values(column: pa.ChunkedArray) -> tuple[_Words, _Words]:
    """The same of a single column, in which each value is hashed once, however many rows have it."""
    chunks = column.dictionary_encode("encode").chunks
    if not chunks:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    code = np.concatenate([chunk.indices.to_numpy() for chunk in chunks])
    h1, h2 = hashes_of([chunks[0].dictionary])  # they share one
    return h1[code], h2[code]


def _column(column: pa.Array, seeds: _Words, is_null: Any) -> _Words:
    width = _width(column.type)
    if width is None:
        hashed = _texts(column.cast(pa.binary()), seeds)
    elif width == 8:
        hashed = _fixed(column.cast(pa.int64()).fill_null(0).to_numpy().view(np.uint64), 8, seeds)
    else:
        kind = pa.int8() if pa.types.is_boolean(column.type) else pa.int32()
        numbers = column.cast(kind).fill_null(0).to_numpy().astype(np.int32)
        hashed = _fixed(numbers.view(np.uint32).astype(np.uint64), 4, seeds)
    return np.where(is_null, seeds, hashed) if column.null_count else hashed


def _width(kind: pa.DataType) -> int | None:
    """The bytes of a number that Spark hashes as such."""
    if kind == pa.int64() or pa.types.is_timestamp(kind):
        return 8
    shorter = (pa.int8(), pa.int16(), pa.int32(), pa.date32(), pa.bool_())
    return 4 if kind in shorter else None


def _texts(column: pa.Array, seeds: _Words) -> _Words:
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(column) + 1, column.offset * 4)
    data = np.frombuffer(data_buffer or b"", np.uint8)
    lengths, result = np.diff(offsets), np.empty(len(column), np.uint64)
    for length in np.unique(lengths).tolist():
        same = np.flatnonzero(lengths == length)
        for start in range(0, len(same), _BLOCK_ROWS):
            rows = same[start : start + _BLOCK_ROWS]
            places = offsets[rows].astype(np.int64)[:, None] + np.arange(length)
            result[rows] = _bytes(data[places], seeds[rows])
    return result


def _bytes(rows: Any, seeds: _Words) -> _Words:
    """XXH64 of the rows of a matrix of bytes."""
    length, at = rows.shape[1], 0
    with np.errstate(over="ignore"):
        if length >= _STRIPE:
            at = length - length % _STRIPE
            hashed = _stripes(_lanes(rows[:, :at]), seeds)
        else:
            hashed = seeds + _P5
        hashed = hashed + np.uint64(length)
        for start in range(at, length - 7, 8):
            hashed = _lane(hashed, _lanes(rows[:, start : start + 8])[:, 0])
            at = start + 8
        if at + 4 <= length:
            words = np.ascontiguousarray(rows[:, at : at + 4]).view("<u4").astype(np.uint64)[:, 0]
            hashed = _half(hashed, words)
            at += 4
        for each in range(at, length):
            hashed = _rotated(hashed ^ (rows[:, each].astype(np.uint64) * _P5), 11) * _P1
        return _mixed(hashed)


def _fixed(numbers: _Words, width: int, seeds: _Words) -> _Words:
    """XXH64 of numbers of four or eight bytes."""
    with np.errstate(over="ignore"):
        hashed = seeds + (_P5 + np.uint64(width))
        return _mixed(_lane(hashed, numbers) if width == 8 else _half(hashed, numbers))


def _stripes(lanes: _Words, seeds: _Words) -> _Words:
    sums = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
    for start in range(0, lanes.shape[1], 4):
        sums = [_round(each, lanes[:, start + number]) for number, each in enumerate(sums)]
    hashed = sum(_rotated(each, by) for each, by in zip(sums, (1, 7, 12, 18), strict=True))
    for each in sums:
        hashed = (hashed ^ _round(np.zeros_like(each), each)) * _P1 + _P4
    return hashed


def _lanes(rows: Any) -> _Words:
    return np.ascontiguousarray(rows).view("<u8")


def _round(hashed: _Words, lane: _Words) -> _Words:
    return _rotated(hashed + lane * _P2, 31) * _P1


def _lane(hashed: _Words, lane: _Words) -> _Words:
    return _rotated(hashed ^ _round(np.zeros_like(lane), lane), 27) * _P1 + _P4


def _half(hashed: _Words, half: _Words) -> _Words:
    return _rotated(hashed ^ (half * _P1), 23) * _P2 + _P3


def _mixed(hashed: _Words) -> _Words:
    hashed = (hashed ^ (hashed >> np.uint64(33))) * _P2
    hashed = (hashed ^ (hashed >> np.uint64(29))) * _P3
    return hashed ^ (hashed >> np.uint64(32))


def _rotated(words: _Words, by: int) -> _Words:
    return (words << np.uint64(by)) | (words >> np.uint64(64 - by))
