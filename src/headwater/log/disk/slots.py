"""A slot file: small facts that many processes read without a lock while one of them changes them.

Format: one 4,096-byte file, mapped by everybody: magic of 6 bytes, format u16; then 512 bytes for each fact: an aligned
u64 at 0, the generation of the fact (high half) and the crc32c of that number (low half); slot 0 at 64, slot 1 at 288. A
slot is its generation u32, the fact's bytes, and the crc32c of both. Generation g stands in slot g & 1. The u64 at 8 of each 512
bytes means nothing: it is changed before a sync, so that the whole page is written again where an earlier sync has failed.

An update fills the slot that does not count and then sets the word to the next generation. A process killed at any
instruction leaves a whole slot behind; a reader that was overtaken twice sees that slot and word differ and looks again;
and no flipped bit, in a slot or in the word, makes an older fact pass for the present one. As long as the word stays what it
was, so does the fact: a reader that has seen it before looks at eight bytes only.

Invariant: each fact is changed only under a lock of its own; who holds it is said where the fact is defined.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

from crc32c import crc32c

from headwater.log.disk.atomic_file import replace_file
from headwater.log.disk.disk import Disk
from headwater.model.errors import Damaged, FormatTooNew

SLOT_FILE_BYTES = 4096

_START = struct.Struct("<6sH")
_GENERATION = struct.Struct("<I")
_GENERATION_MAX = 0xFFFFFFFF
_CHECKSUM = struct.Struct("<I")
_FACT_BYTES = 512
_TOUCHED = range(1, SLOT_FILE_BYTES // 8, _FACT_BYTES // 8)
_WORD_MAX = 0xFFFFFFFFFFFFFFFF
_WORDS = tuple(range(_FACT_BYTES // 8, SLOT_FILE_BYTES // 8, _FACT_BYTES // 8))
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
        self._known: list[tuple[int, tuple[Any, ...]]] = [(-1, ())] * len(shapes)
        found, version = _START.unpack_from(self._view)
        if found != magic:
            raise self._damaged("its first bytes are wrong")
        if version > format_max:
            raise FormatTooNew(
                f"{path} has format {version}; this Headwater reads up to {format_max}.", advice="Upgrade Headwater."
            )

    def read(self, fact: int) -> tuple[Any, ...]:
        """A fact as it was at one moment."""
        known, values = self._known[fact]
        if known == self._words[_WORDS[fact]]:
            return values
        shape, place = self._shapes[fact], _FACT_BYTES * (fact + 1)
        for _ in range(_LOOKS_MAX):
            word = self._words[_WORDS[fact]]
            generation = word >> 32
            found = self._slot(place + _SLOTS[generation & 1], shape)
            if found is not None and found[0] == generation and word == _word(generation):
                self._known[fact] = (word, found[1])
                return found[1]
        raise self._damaged("no slot's checksum holds")

    def is_written(self, fact: int) -> bool:
        """Whether the file has the fact at all; one from before the fact was thought of has zeros there."""
        return bool(self._words[_WORDS[fact]])

    def take_unwritten_for(self, fact: int, *values: Any) -> None:
        """What `read` gives of a fact that was never written."""
        self._known[fact] = (0, values)

    def read_all(self, fact: int) -> list[tuple[Any, ...]]:
        """Every version of a fact that is whole: after a power loss the one that counts may be torn."""
        place = _FACT_BYTES * (fact + 1)
        found = [self._slot(place + slot, self._shapes[fact]) for slot in _SLOTS]
        return [slot[1] for slot in found if slot is not None]

    def write(self, fact: int, *values: Any) -> None:
        """Changes a fact; the caller holds its lock. The values are what `read` gives: bytes in full length."""
        place = _FACT_BYTES * (fact + 1)
        generation = (self._words[_WORDS[fact]] >> 32) + 1 & _GENERATION_MAX
        at = place + _SLOTS[generation & 1]
        data, word = _encode(generation, self._shapes[fact], values), _word(generation)
        self._view[at : at + len(data)] = data
        self._words[_WORDS[fact]] = word
        self._known[fact] = (word, values)

    def write_after_power_loss(self, fact: int, *values: Any) -> None:
        """Changes a fact whose word or slots may be torn: never in place of the only slot that is whole."""
        place = _FACT_BYTES * (fact + 1)
        found = [self._slot(place + slot, self._shapes[fact]) for slot in _SLOTS]
        generations = [-1 if slot is None else slot[0] for slot in found]
        target = generations.index(min(generations))
        generation = max(*generations, 0) + 1
        generation += (generation & 1) != target
        data = _encode(generation, self._shapes[fact], values)
        at = place + _SLOTS[target]
        self._view[at : at + len(data)] = data
        self._words[_WORDS[fact]] = _word(generation)

    def sync(self) -> None:
        """Returns when the file is on disk, even if an earlier sync has failed, in any process: that left its pages clean."""
        for word in _TOUCHED:
            self._words[word] = self._words[word] + 1 & _WORD_MAX
        self._map.sync()

    def close(self) -> None:
        """Ends the mapping."""
        self._words.release()
        self._map.close()

    def _slot(self, at: int, shape: struct.Struct) -> tuple[int, tuple[Any, ...]] | None:
        """A slot's generation and fact, if it is whole."""
        size = _GENERATION.size + shape.size
        raw = bytes(self._view[at : at + size + 4])
        if _CHECKSUM.unpack_from(raw, size)[0] != crc32c(raw[:size]):
            return None
        return _GENERATION.unpack_from(raw)[0], shape.unpack_from(raw, _GENERATION.size)

    def _damaged(self, why: str) -> Damaged:
        return Damaged(
            f"{self.path} is damaged: {why}.",
            advice="Run `headwater doctor --repair`, which rebuilds it from the events. Nothing is lost.",
        )


def create_slot_file(
    disk: Disk,
    path: str,
    *,
    magic: bytes,
    version: int,
    facts: Sequence[tuple[struct.Struct, tuple[Any, ...]]],
) -> None:
    """Puts a slot file at its path as a whole, so that nobody maps half of one; the caller syncs the folder."""
    replace_file(disk, path, [_page(magic, version, facts, generation=0)], sync_folder=False)


def begin_anew(
    disk: Disk, path: str, *, magic: bytes, version: int, facts: Sequence[tuple[struct.Struct, tuple[Any, ...]]]
) -> None:
    """Writes a slot file that is damaged anew, in its place, since others may have it mapped; what it was is kept beside it.

    The caller holds the locks of its facts. A crash in between leaves a file that is damaged as before.
    """
    file = disk.open(path, "write")
    try:
        copy = disk.open(f"{path}.damaged", "create")
        try:
            copy.truncate(0)
            copy.write_at(0, [file.read_at(0, file.size())])
            copy.sync()
        finally:
            copy.close()
        generation = time.time_ns() >> 10 & _GENERATION_MAX & ~1  # none that anybody remembers
        file.truncate(SLOT_FILE_BYTES)
        file.write_at(0, [_page(magic, version, facts, generation=generation)])
        file.sync()
    finally:
        file.close()
    disk.sync_folder(path.rpartition("/")[0])


def _page(
    magic: bytes, version: int, facts: Sequence[tuple[struct.Struct, tuple[Any, ...]]], *, generation: int
) -> bytes:
    page = bytearray(SLOT_FILE_BYTES)
    _START.pack_into(page, 0, magic, version)
    for number, (shape, values) in enumerate(facts):
        data = _encode(generation, shape, values)
        place = _FACT_BYTES * (number + 1)
        page[place : place + 8] = struct.pack("<Q", _word(generation))
        page[place + _SLOTS[0] : place + _SLOTS[0] + len(data)] = data
    return bytes(page)


def _word(generation: int) -> int:
    return generation << 32 | crc32c(_GENERATION.pack(generation))


def _encode(generation: int, shape: struct.Struct, values: tuple[Any, ...]) -> bytes:
    data = _GENERATION.pack(generation) + shape.pack(*values)
    return data + _CHECKSUM.pack(crc32c(data))
