"""Columns out of bytes: the fields of thousands of messages gathered by NumPy, and columns of text made by one copy.

What the protocols of databases send is taken apart by whole blocks, never value by value. Functions only, no state: safe from any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Indexes = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def everywhere(data: Bytes, kind: str) -> Any:
    """A view of the data that has a number at every byte."""
    width = np.dtype(kind).itemsize
    return np.ndarray((max(0, len(data) - width + 1),), kind, data, strides=(1,))


def numbers(data: Bytes, at: Indexes, kind: str) -> Indexes:
    """The numbers that begin at some bytes."""
    found: Indexes = everywhere(data, kind)[at].astype(np.int64)
    return found


def texts_at(data: Bytes, start: Indexes, length: Indexes, there: Flags) -> pa.Array:
    """Stretches of the data as Arrow bytes, null where nothing is.

    They must stand in the order of the data: then the offsets of the texts and of what lies between them are those of one Arrow
    array over the data itself, and taking every second value copies each text once.
    """
    count = len(start)
    if not count:
        return pa.nulls(0, pa.binary())
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0:-1:2] = start
    offsets[1::2] = start + length
    offsets[-1] = offsets[-2]
    everything = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    picks = np.arange(0, 2 * count, 2)
    return everything.take(pa.array(picks) if there.all() else pa.array(picks, mask=~there))


def hexadecimal(values: Indexes, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """One row of digits for each number."""
    octets = values.astype(">u8").view(np.uint8).reshape(len(values), 8)[:, 8 - width // 2 :]
    digits = np.empty((len(values), width), np.uint8)
    digits[:, 0::2] = _DIGITS[octets >> 4]
    digits[:, 1::2] = _DIGITS[octets & 15]
    return digits


def fixed_texts(characters: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> pa.Array:
    """Texts of one length, one from each row of characters."""
    count, width = characters.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    data = np.ascontiguousarray(characters)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
