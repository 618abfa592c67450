"""A manifest: what a backup consists of, and what the log was at that moment.

Format: a readable file (see `headwater.log.disk.text`) of the kind `backup`, named `manifest-<time in µs, 20 digits>`, in the
backup's folder. It lists every file of the backup with its size and crc32c, and for each partition its offsets, its segments in
order and the mark at which the last of them ends. The file is written last: a backup without a whole manifest was not finished
and does not count.

Invariant: the segments of a partition follow one another without a gap, and the last one is of frames, so that the log goes on
from there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headwater.log.disk.text import decode_text, encode_text
from headwater.log.file.partition.head import Mark
from headwater.model.errors import Damaged

KIND = "backup"


class StoredFile(msgspec.Struct, frozen=True):
    """One file of the backup, by its path inside it."""

    name: str
    size: int
    crc: int


class SegmentCopy(msgspec.Struct, frozen=True):
    """A segment: its offsets, its kind, and how long its file was in the log.

    `digest` stands for the content of a sealed segment, so that it is known again without being read whole; empty for frames, and in
    manifests that were written before there was one.
    """

    base: int
    end: int
    kind: Literal["frames", "arrow"]
    source_bytes: int
    file: StoredFile
    digest: str = ""


class PartitionCopy(msgspec.Struct, frozen=True):
    """A partition up to the snapshot's end."""

    first: int
    mark: Mark
    segments: list[SegmentCopy]


class TopicCopy(msgspec.Struct, frozen=True):
    """A topic, as its file described it."""

    topic: dict[str, Any]
    partitions: list[PartitionCopy]


class OtherFile(msgspec.Struct, frozen=True):
    """A small file of the log's folder that is no part of a topic: a place in the file of all such files."""

    path: str
    position: int
    size: int
    crc: int


class Manifest(msgspec.Struct, frozen=True):
    """A whole backup."""

    log_id: str
    taken_us: int
    incarnation: int
    incarnations: list[dict[str, Any]]
    transaction: int
    topics: dict[str, TopicCopy]
    producers: dict[str, int]
    folders: list[str]
    others: list[OtherFile]
    others_file: StoredFile | None

    @property
    def events(self) -> int:
        """How many events it holds."""
        return sum(part.mark.end - part.first for topic in self.topics.values() for part in topic.partitions)

    def files(self) -> list[StoredFile]:
        """Every file beside the manifest."""
        found = [one.file for topic in self.topics.values() for part in topic.partitions for one in part.segments]
        return [*found, *([self.others_file] if self.others_file else [])]


def manifest_name(taken_us: int) -> str:
    """The file's name; names sort as times do."""
    return f"manifest-{taken_us:020d}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes."""
    return encode_text(KIND, msgspec.to_builtins(manifest))


def decode_manifest(raw: bytes, path: str) -> Manifest:
    """The manifest; `Damaged` where it is not whole."""
    try:
        return msgspec.convert(decode_text(raw, path, KIND), Manifest)
    except msgspec.ValidationError as error:
        raise Damaged(f"{path} is not the manifest of a backup: {error}.", advice="Use another backup.") from None
