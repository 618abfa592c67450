"""A slot file: small facts that many processes read without a lock while one of them changes them.

Format: one 4,096-byte file, mapped by everybody: magic of 6 bytes, format u16; then 512 bytes for each fact: an aligned
u64 at 0 that says which slot counts, slot 0 at 64, slot 1 at 288. Each slot ends in the crc32c of its bytes.

An update fills the slot that does not count and then turns the word. A process killed at any instruction leaves a whole
slot behind, and a reader that was overtaken twice sees a checksum fail and looks again.

Invariant: each fact is changed only under a lock of its own; who holds it is said where the fact is defined.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from crc32c import crc32c

from headwater.log.disk import Disk
from headwater.model.errors import Damaged, FormatTooNew

SLOT_FILE_BYTES = 4096

_START = struct.Struct("<6sH")
_CHECKSUM = struct.Struct("<I")
_FACT_BYTES = 512
_SLOTS = (64, 288)
_LOOKS_MAX = 1000


class SlotFile:
    """A mapped slot file whose facts have the given shapes."""

    def __init__(
        self, disk: Disk, path: str, *, magic: bytes, format_max: int, shapes: Sequence[struct.Struct], writable: bool
    ) -> None:
        self.path = path
        self._shapes = shapes
        self._map = disk.map(path, SLOT_FILE_BYTES, writable=writable)
        self._view = self._map.view
        self._words = self._view.cast("Q")
        found, version = _START.unpack_from(self._view)
        if found != magic:
            raise self._damaged("its first bytes are wrong")
        if version > format_max:
            raise FormatTooNew(
                f"{path} has format {version}; this Headwater reads up to {format_max}.", advice="Upgrade Headwater."
            )

    def read(self, fact: int) -> tuple[Any, ...]:
        """A fact as it was at one moment."""
        shape, place = self._shapes[fact], _FACT_BYTES * (fact + 1)
        size = shape.size
        for _ in range(_LOOKS_MAX):
            at = place + _SLOTS[self._words[place // 8] & 1]
            raw = bytes(self._view[at : at + size + 4])
            if _CHECKSUM.unpack_from(raw, size)[0] == crc32c(raw[:size]):
                return shape.unpack_from(raw)
        raise self._damaged("no slot's checksum holds")

    def read_all(self, fact: int) -> list[tuple[Any, ...]]:
        """Every version of a fact that is whole: after a power loss the one that counts may be torn."""
        shape, place = self._shapes[fact], _FACT_BYTES * (fact + 1)
        found = []
        for slot in _SLOTS:
            raw = bytes(self._view[place + slot : place + slot + shape.size + 4])
            if _CHECKSUM.unpack_from(raw, shape.size)[0] == crc32c(raw[: shape.size]):
                found.append(shape.unpack_from(raw))
        return found

    def write(self, fact: int, *values: Any) -> None:
        """Changes a fact; the caller holds its lock."""
        place = _FACT_BYTES * (fact + 1)
        other = 1 - (self._words[place // 8] & 1)
        at = place + _SLOTS[other]
        data = self._shapes[fact].pack(*values)
        self._view[at : at + len(data) + 4] = data + _CHECKSUM.pack(crc32c(data))
        self._words[place // 8] = other

    def sync(self) -> None:
        """Returns when the file is on disk."""
        self._map.sync()

    def close(self) -> None:
        """Ends the mapping."""
        self._words.release()
        self._map.close()

    def _damaged(self, why: str) -> Damaged:
        return Damaged(
            f"{self.path} is damaged: {why}.",
            advice="Run `headwater doctor --repair`: it is rebuilt from the events, nothing is lost.",
        )


def create_slot_file(
    disk: Disk,
    path: str,
    *,
    magic: bytes,
    version: int,
    facts: Sequence[tuple[struct.Struct, tuple[Any, ...]]],
) -> None:
    """Writes a slot file beside its path and moves it there, so that nobody maps half of one."""
    page = bytearray(SLOT_FILE_BYTES)
    _START.pack_into(page, 0, magic, version)
    for number, (shape, values) in enumerate(facts):
        data = shape.pack(*values)
        for slot in _SLOTS:
            at = _FACT_BYTES * (number + 1) + slot
            page[at : at + len(data) + 4] = data + _CHECKSUM.pack(crc32c(data))
    fresh = disk.open(f"{path}.new", "create")
    try:
        fresh.write_at(0, [bytes(page)])
        fresh.sync()
    finally:
        fresh.close()
    disk.rename(f"{path}.new", path)
