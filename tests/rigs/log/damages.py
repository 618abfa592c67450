"""Damages: what disks, and people, do to files. Each changes one file by chance and says what it did."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, random.Random], str]


def flip(path: Path, chance: random.Random) -> str:
    """Flips one bit, more often than not where there is something."""
    content = bytearray(path.read_bytes())
    places = [at for at, byte in enumerate(content) if byte] if chance.random() < 0.7 else range(len(content))
    at, bit = chance.choice(places), chance.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"flip of bit {bit} of byte {at}"


def flip_word(path: Path, chance: random.Random) -> str:
    """Flips a bit near the beginning of a file, or of one of its facts: where a few bytes decide about everything."""
    content = bytearray(path.read_bytes())
    at = min(chance.choice([0, 512, 1024, 1536]) + chance.randrange(8), len(content) - 1)
    bit = chance.choice([0, 0, 0, 1, chance.randrange(8)])
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"flip of bit {bit} of byte {at}"


def zero(path: Path, chance: random.Random) -> str:
    """Puts zeros where a sector was."""
    content = bytearray(path.read_bytes())
    at = chance.randrange(0, len(content), 512)
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)
    return f"zeros from {at}"


def cut(path: Path, chance: random.Random) -> str:
    """Cuts the file: to nothing, by one byte, at a page or anywhere."""
    size = path.stat().st_size
    length = chance.choice([0, 1, size - 1, size // 4096 * 4096, chance.randrange(size), size // 2])
    os.truncate(path, length)
    return f"cut from {size} to {length}"


FLIPS: list[Damage] = [flip, flip_word]
CUTS: list[Damage] = [cut, zero]
