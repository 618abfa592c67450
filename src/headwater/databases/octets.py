"""Octets: columns of bytes as base64 text and back, and of decimals as the big-endian integers that JSON of Kafka Connect carries.

Whole columns at a time, by NumPy: no value becomes a Python object. Base64 is the standard alphabet with padding. A decimal is
its unscaled value in two's complement, most significant byte first, as few bytes as hold it. `ValueError` where text is no base64,
or a number takes more than 16 bytes. Functions only: safe from any thread.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

DECIMAL_BYTES = 16
"""What a number of 38 digits takes."""

_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
_PAD = ord("=")
_NO_DIGIT = 255
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
_DIGITS[_ALPHABET] = np.arange(64)
_DIGITS[_PAD] = 0


def from_base64(texts: pa.Array) -> pa.Array:
    """The bytes that texts stand for; null stays null."""
    lengths, data = _parts(texts)
    ends = np.cumsum(lengths)
    if (lengths % 4).any():
        raise ValueError("a length of base64 that is no multiple of four")
    pads = np.zeros(len(lengths), np.int64)
    filled = lengths > 0
    pads[filled] = (data[ends[filled] - 1] == _PAD).astype(np.int64) + (data[ends[filled] - 2] == _PAD)
    digits = _DIGITS[data]
    if (digits == _NO_DIGIT).any() or np.count_nonzero(data == _PAD) != pads.sum():
        raise ValueError("a character that base64 does not have")
    quads = digits.reshape(-1, 4).astype(np.uint32)
    words = quads[:, 0] << 18 | quads[:, 1] << 12 | quads[:, 2] << 6 | quads[:, 3]
    octets = np.stack([words >> 16, words >> 8, words], axis=1).astype(np.uint8).reshape(-1)
    kept = np.ones(len(octets), bool)
    last = ends * 3 // 4
    kept[last[pads > 0] - 1] = False
    kept[last[pads > 1] - 2] = False
    return _column(lengths // 4 * 3 - pads, octets[kept], texts, pa.binary())


def to_base64(values: pa.Array) -> pa.Array:
    """The text of each value; null stays null."""
    lengths, data = _parts(values)
    groups = (lengths + 2) // 3
    padded = np.zeros(int(groups.sum()) * 3, np.uint8)
    first = np.concatenate([[0], np.cumsum(groups)[:-1]]) * 3
    padded[_ranges(first, lengths)] = data
    triples = padded.reshape(-1, 3).astype(np.uint32)
    words = triples[:, 0] << 16 | triples[:, 1] << 8 | triples[:, 2]
    digits = np.stack([words >> 18, words >> 12 & 63, words >> 6 & 63, words & 63], axis=1).reshape(-1)
    texts = _ALPHABET[digits]
    pads = groups * 3 - lengths
    last = np.cumsum(groups) * 4
    texts[last[pads > 0] - 1] = _PAD
    texts[last[pads > 1] - 2] = _PAD
    return _column(groups * 4, texts, values, pa.string())


def to_decimals(octets: pa.Array, type_: pa.DataType) -> pa.Array:
    """The decimals of which these bytes are the unscaled values."""
    lengths, data = _parts(octets)
    if (lengths > DECIMAL_BYTES).any():
        raise ValueError(f"a number of more than {DECIMAL_BYTES} bytes")
    starts = np.cumsum(lengths) - lengths
    negative = np.zeros(len(lengths), bool)
    negative[lengths > 0] = data[starts[lengths > 0]] >= 128
    wide = np.repeat(np.where(negative, 255, 0).astype(np.uint8), DECIMAL_BYTES)
    first = np.arange(len(lengths)) * DECIMAL_BYTES + DECIMAL_BYTES - lengths
    wide[_ranges(first, lengths)] = data
    little = np.ascontiguousarray(wide.reshape(-1, DECIMAL_BYTES)[:, ::-1])
    made = pa.Array.from_buffers(type_, len(octets), [_validity(octets), pa.py_buffer(little)])
    made.validate(full=True)
    return made


def from_decimals(column: pa.Array) -> pa.Array:
    """The unscaled value of each decimal, in as few bytes as hold it."""
    count = len(column)
    little = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * DECIMAL_BYTES :][: count * DECIMAL_BYTES]
    wide = little.reshape(count, DECIMAL_BYTES)[:, ::-1]
    fill = np.where(wide[:, :1] >= 128, 255, 0)
    # A byte is needed if it is not only the sign, or if the next one would be taken for another sign without it.
    needed = (wide != fill)[:, :-1] | ((wide[:, 1:] >= 128) != (fill >= 128))
    lengths = DECIMAL_BYTES - np.where(needed.any(axis=1), needed.argmax(axis=1), DECIMAL_BYTES - 1)
    lengths[np.asarray(column.is_null())] = 0
    kept = np.arange(DECIMAL_BYTES)[None, :] >= DECIMAL_BYTES - lengths[:, None]
    return _column(lengths, wide[kept], column, pa.binary())


def _parts(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The length of each value, null counting as none, and the bytes of all of them."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1].astype(np.int64)
    held = column.buffers()[2]
    data = np.frombuffer(held, np.uint8) if held is not None else np.zeros(0, np.uint8)
    lengths = np.diff(offsets)
    null = np.asarray(column.is_null())
    if (lengths[null] > 0).any():
        return np.where(null, 0, lengths), data[_ranges(offsets[:-1][~null], lengths[~null])]
    return lengths, data[offsets[0] : offsets[-1]]


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The indices of all ranges, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(before - starts, lengths)


def _column(lengths: np.ndarray, data: np.ndarray, like: pa.Array, type_: pa.DataType) -> pa.Array:
    """A column of these bytes, null where another is."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError("more bytes than one column holds")
    buffers = [_validity(like), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(type_, len(lengths), buffers)


def _validity(like: pa.Array) -> pa.Buffer | None:
    if not like.null_count:
        return None
    return pa.array(np.asarray(like.is_valid())).buffers()[1]
