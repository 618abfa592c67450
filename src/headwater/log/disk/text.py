"""A readable file with a checksum: a first line `headwater <kind> <format> <crc32c of the rest, hex>`, then JSON.

It is replaced whole (written beside, synced, renamed).
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from crc32c import crc32c

from headwater.log.disk.atomic_file import read_file, replace_file
from headwater.log.disk.disk import Disk
from headwater.model.errors import Damaged, FormatTooNew

FORMAT = 1


def write_text(disk: Disk, path: str, kind: str, content: Any) -> None:
    """Replaces a readable file as a whole."""
    replace_file(disk, path, [encode_text(kind, content)])


def read_text(disk: Disk, path: str, kind: str) -> Any:
    """What `write_text` wrote; `Damaged` where its checksum fails, `FileNotFoundError` where it is missing."""
    return decode_text(read_file(disk, path), path, kind)


def encode_text(kind: str, content: Any) -> bytes:
    """A readable file's bytes: the line with its checksum, then JSON."""
    body = json.dumps(content, indent=1, ensure_ascii=True).encode("ascii")
    return f"headwater {kind} {FORMAT} {crc32c(body):08x}\n".encode("ascii") + body


def decode_text(raw: bytes, path: str, kind: str) -> Any:
    """What `encode_text` made; `Damaged` where its checksum fails."""
    first, _, body = raw.partition(b"\n")
    words = first.split(b" ")
    if len(words) != 4 or words[0] != b"headwater" or words[1] != kind.encode("ascii"):
        raise _damaged(path, kind)
    if words[2].isdigit() and int(words[2]) > FORMAT:
        raise FormatTooNew(
            f"{path} has format {int(words[2])}; this Headwater reads up to {FORMAT}.", advice="Upgrade Headwater."
        )
    if words[3] != f"{crc32c(body):08x}".encode("ascii"):
        raise _damaged(path, kind)
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        raise _damaged(path, kind) from None


def _damaged(path: str, kind: str) -> Damaged:
    return Damaged(
        f"{path} is damaged: it is not a whole {kind} file.",
        advice="Restore this one file from a backup or a mirror; the events beside it are untouched.",
    )
