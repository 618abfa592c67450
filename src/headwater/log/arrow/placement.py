"""Placement: which partition an event goes to, exactly as Kafka's default partitioner decides it.

    partition = (murmur2(bytes of the key) & 0x7fffffff) % partitions

The bytes of a key, by the type of its column (this is stored behaviour: it must never change):
- STRING: its UTF-8;
- BINARY: as it is;
- TINYINT, SMALLINT, INT, BIGINT: eight bytes, big-endian, two's complement (so widening a key keeps its partition);
- everything else: canonical JSON, which is UTF-8 without spaces and with the fields of structs sorted by name; times are
  ISO 8601 (`"2026-01-31T12:00:00Z"`, `"2026-01-31T12:00:00.500000Z"`; TIMESTAMP_NTZ without the Z), decimals strings, binary
  fields base64, NaN and the infinities null, -0.0 the same as 0.0. Maps have no order and cannot be keys.

Whether two keys are the same is another question (`comparable_keys`): as in SQL and Spark, -0.0 is 0.0 and NaN is one key
whatever its bits, but NaN and the infinities are three. Keys that are the same always have the same bytes.

No key (null) hashes to nothing: `partitions_of` says -1 and the caller picks a partition. Whole batches are hashed at once
in blocks that stay in the processor's cache; below 16 keys a plain loop is quicker than NumPy's fixed costs.
Functions only, no state: safe from any thread.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.columns import values_of
from headwater.log.port.topic import PARTITIONS_MAX
from headwater.model.ddl import type_to_ddl
from headwater.model.errors import InvalidSchema

_M = 0x5BD1E995
_SEED = 0x9747B28C
_MASK = 0xFFFFFFFF
_BLOCK_KEYS = 32_768
_SCALAR_KEYS_MAX = 16
_SCALAR_ROWS_MAX = 8
_ONLY = np.arange(PARTITIONS_MAX, dtype=np.int32)
_TAIL_MASK = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
_TAIL_FACTOR = np.array([1, _M, _M, _M], np.uint32)

_Words = npt.NDArray[np.uint32]


def key_bytes(column: pa.Array) -> pa.Array:
    """The bytes of each key of a column, as a binary array; null stays null."""
    type_ = column.type
    if pa.types.is_binary(type_):
        return column
    if pa.types.is_string(type_):
        return column.view(pa.binary())
    if pa.types.is_signed_integer(type_):
        return _big_endian(column)
    if _has(type_, pa.types.is_map):
        raise InvalidSchema(
            f"A column of type {type_to_ddl(type_)} cannot be a key: the entries of a map have no order.",
            advice="Use a STRING, BINARY or integer column.",
        )
    encode = msgspec.json.Encoder(order="sorted").encode
    return pa.array([None if value is None else encode(value) for value in _normal_values(column)], pa.binary())


def comparable_keys(column: pa.Array) -> pa.Array:
    """Each key in a form that is equal where the keys are the same, and can be grouped by; null stays null."""
    if pa.types.is_floating(column.type):
        return _normal_floats(column)
    if not pa.types.is_nested(column.type):
        return column
    if not _has(column.type, pa.types.is_floating):
        return key_bytes(column)
    return pa.array([None if value is None else repr(value).encode() for value in _normal_values(column)], pa.binary())


def _normal_values(column: pa.Array) -> list[Any]:
    values = values_of(column)
    return [_normal(value) for value in values] if _has(column.type, pa.types.is_floating) else values


def _normal(value: Any) -> Any:
    """A value without -0.0."""
    if isinstance(value, float):
        return value + 0.0
    if isinstance(value, dict):
        return {name: _normal(one) for name, one in value.items()}
    return [_normal(one) for one in value] if isinstance(value, list) else value


def _normal_floats(column: pa.Array) -> pa.Array:
    """Numbers without -0.0, and with one NaN of all there are."""
    plain = pc.add(column, pa.scalar(0.0, column.type))
    is_nan = pc.is_nan(plain)
    return pc.if_else(is_nan, pa.scalar(math.nan, column.type), plain) if pc.any(is_nan).as_py() else plain


def murmur2(keys: pa.Array) -> npt.NDArray[np.int32]:
    """Kafka's murmur2 of each key of a binary array; what stands at a null key means nothing."""
    if len(keys) < _SCALAR_KEYS_MAX:
        hashes = [_murmur2_scalar(key or b"") for key in keys.to_pylist()]
        return np.array(hashes, np.uint32).view(np.int32)
    _, offsets_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(keys) + 1, keys.offset * 4)
    data = np.frombuffer(data_buffer or b"", np.uint8)
    out = np.empty(len(keys), np.uint32)
    for start in range(0, len(keys), _BLOCK_KEYS):
        _murmur2_block(data, offsets[start : start + _BLOCK_KEYS + 1], out[start : start + _BLOCK_KEYS])
    return out.view(np.int32)


def partitions_of(keys: pa.Array, partitions: int) -> npt.NDArray[np.int32]:
    """The partition of each key of a binary array (see `key_bytes`), and -1 where there is no key."""
    positive = murmur2(keys).view(np.uint32) & np.uint32(0x7FFFFFFF)
    # Not `%`: NumPy divides by a constant with multiplications, twice as fast as it takes remainders.
    places = (positive - positive // np.uint32(partitions) * np.uint32(partitions)).view(np.int32)
    if keys.null_count:
        places[keys.is_null().to_numpy(zero_copy_only=False)] = -1
    return places


class Placement(msgspec.Struct, frozen=True):
    """The partition of each row of a batch; `only` where it is known that all have the same."""

    partitions: npt.NDArray[np.int32]
    count: int
    only: int | None = None

    def groups(self) -> list[tuple[int, npt.NDArray[np.int64] | None]]:
        """For each partition that occurs, its rows in their order; None where one partition has them all."""
        if self.only is not None:
            return [(self.only, None)]
        if not len(self.partitions):
            return []
        first = int(self.partitions[0])
        if (self.partitions == first).all():
            return [(first, None)]
        # Stable sorts of 8- and 16-bit numbers are radix sorts: a few nanoseconds a row.
        ordered = np.argsort(self.partitions.astype(np.uint8 if self.count <= 256 else np.uint16), kind="stable")
        counts = np.bincount(self.partitions, minlength=self.count)
        ends = np.cumsum(counts)
        return [(n, ordered[ends[n] - counts[n] : ends[n]]) for n in np.flatnonzero(counts).tolist()]


def place(rows: pa.RecordBatch, key: str | None, partitions: int, *, sticky: int) -> Placement:
    """Where each row goes: by its key, and rows without one together to the partition `sticky` stands for."""
    alone = sticky % partitions
    if rows.num_rows == 1:
        value = None if key is None else _one_key(rows.column(key))
        only = alone if value is None else (_murmur2_scalar(value) & 0x7FFFFFFF) % partitions
        return Placement(_ONLY[only : only + 1], partitions, only)
    if key is None:
        return Placement(np.full(rows.num_rows, alone, np.int32), partitions, alone if rows.num_rows else None)
    places = partitions_of(key_bytes(rows.column(key)), partitions)
    if rows.column(key).null_count:
        places[places < 0] = alone
    return Placement(places, partitions)


def _one_key(column: pa.Array) -> bytes | None:
    """`key_bytes` of a column of one."""
    if not pa.types.is_signed_integer(column.type):
        return key_bytes(column)[0].as_py()
    value = column[0].as_py()
    return None if value is None else value.to_bytes(8, "big", signed=True)


def _big_endian(column: pa.Array) -> pa.Array:
    longs = column.cast(pa.int64())
    values = np.frombuffer(longs.buffers()[1] or b"", np.int64, len(longs), longs.offset * 8).astype(">i8")
    offsets = np.arange(0, 8 * len(longs) + 1, 8, dtype=np.int32)
    present = pa.array(longs.is_valid()).buffers()[1] if longs.null_count else None
    return pa.Array.from_buffers(pa.binary(), len(longs), [present, pa.py_buffer(offsets), pa.py_buffer(values)])


def _has(type_: pa.DataType, kind: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type is of a kind, or one inside it is."""
    if pa.types.is_struct(type_) or pa.types.is_list(type_):
        return any(_has(type_.field(at).type, kind) for at in range(type_.num_fields))
    return kind(type_)


def _murmur2_scalar(key: bytes) -> int:
    whole = len(key) & ~3
    h = _SEED ^ len(key)
    for (k,) in struct.iter_unpack("<I", key[:whole]):
        k = k * _M & _MASK
        h = (h * _M & _MASK) ^ ((k ^ k >> 24) * _M & _MASK)
    if len(key) > whole:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def _murmur2_block(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int32], out: _Words) -> None:
    lengths = np.diff(offsets)
    start, end = int(offsets[0]), int(offsets[-1])
    block = np.zeros(end - start + 4, np.uint8)  # four bytes more, so that the last key's tail can be read as a word
    block[:-4] = data[start:end]
    if (lengths == lengths[0]).all():
        _hash_equal_lengths(block, int(lengths[0]), out)
    else:
        _hash_mixed_lengths(block, offsets[:-1] - start, lengths, out)


def _hash_equal_lengths(block: npt.NDArray[np.uint8], length: int, h: _Words) -> None:
    h[:] = _SEED ^ length
    k, scratch = np.empty_like(h), np.empty_like(h)

    def words_at(at: int) -> Any:
        return np.ndarray(h.shape, "<u4", block.data, at, (length,))

    for at in range(0, length - 3, 4):
        k[:] = words_at(at)
        _mix(h, k, scratch)
    if length & 3:
        np.bitwise_and(words_at(length & ~3), _TAIL_MASK[length & 3], out=k)
        np.bitwise_xor(h, k, out=h)
        np.multiply(h, _M, out=h)
    _finish(h, scratch)


def _hash_mixed_lengths(
    block: npt.NDArray[np.uint8], starts: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], out: _Words
) -> None:
    """Sorted by length, the keys that still have a word number `at` are always the last ones."""
    longest = int(lengths.max())
    order = np.argsort(
        lengths.astype(np.uint8 if longest < 256 else np.uint16 if longest < 65_536 else np.uint32), kind="stable"
    )
    starts, lengths = starts[order], lengths[order]
    whole, tail = lengths >> 2, lengths & 3
    word_from = np.ndarray((len(block) - 3,), "<u4", block.data, 0, (1,))
    h = lengths.astype(np.uint32) ^ np.uint32(_SEED)
    scratch = np.empty_like(h)
    long = range(0)
    for at in range(int(whole[-1])):
        first = int(np.searchsorted(whole, at, side="right"))
        if len(h) - first < _SCALAR_ROWS_MAX:  # a few very long keys must not cost a NumPy call per word
            long = range(first, len(h))
            break
        _mix(h[first:], word_from[starts[first:] + 4 * at], scratch[first:])
    np.bitwise_xor(h, word_from[starts + 4 * whole] & _TAIL_MASK[tail], out=h)
    np.multiply(h, _TAIL_FACTOR[tail], out=h)
    _finish(h, scratch)
    for row in long:
        h[row] = _murmur2_scalar(block[starts[row] : starts[row] + lengths[row]].tobytes())
    out[order] = h


def _mix(h: _Words, k: _Words, scratch: _Words) -> None:
    np.multiply(k, _M, out=k)
    np.right_shift(k, 24, out=scratch)
    np.bitwise_xor(k, scratch, out=k)
    np.multiply(k, _M, out=k)
    np.multiply(h, _M, out=h)
    np.bitwise_xor(h, k, out=h)


def _finish(h: _Words, scratch: _Words) -> None:
    np.right_shift(h, 13, out=scratch)
    np.bitwise_xor(h, scratch, out=h)
    np.multiply(h, _M, out=h)
    np.right_shift(h, 15, out=scratch)
    np.bitwise_xor(h, scratch, out=h)
