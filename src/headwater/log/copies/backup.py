"""A backup: a copy of a local log as it was at one moment, taken while others write.

The order of things, and why it gives one consistent moment:

1. Under the lock of the catalog no topic is made, changed or deleted. The `seal` lock of every partition is taken, so that no
   segment of frames is replaced while it is copied (appends go on).
2. Under `commit.lock` no transaction is decided: every file that is no part of a topic (groups, queues, whatever stands beside) is
   read, then the bounds of all partitions are taken as one snapshot. What was committed as read is therefore never further
   than the events, and of each transaction all is inside or nothing. Then both locks are freed.
3. The closed segments go to the vault, linked where it is on the same disk; what an earlier backup there holds is not copied
   again if it has the same content: frames by their checksum, a sealed segment by a digest of its table, which has the checksum
   of each batch. Offsets alone say nothing: after a power loss other events may have them. Of the newest segment of each
   partition the frames below the snapshot's end are copied. All checksums are looked at.
4. The manifest is written. Only now the backup counts; older manifests, and files that none needs any more, are removed. One that
   somebody restores at this moment stays with its files until the next backup.

A crash at any point leaves the earlier backup whole; what was begun is removed by the next one. Lock order: catalog, `seal` in the
order of (topic, number), `commit.lock`. Thread-safety: a backup runs in one thread; the store may be used by others.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import IO, Any

import msgspec
from crc32c import crc32c

from headwater.log.copies.manifest import (
    Manifest,
    OtherFile,
    PartitionCopy,
    SegmentCopy,
    StoredFile,
    TopicCopy,
    decode_manifest,
    encode_manifest,
    manifest_name,
)
from headwater.log.copies.mirror import check_apart
from headwater.log.copies.vault import Vault, file_pieces, is_folder, open_vault
from headwater.log.disk.fence import Fence
from headwater.log.disk.text import read_text
from headwater.log.file.cursor import segments
from headwater.log.file.handles import GONE
from headwater.log.file.partition.head import Mark
from headwater.log.file.recovery import read_incarnations
from headwater.log.file.segments.frame import damaged
from headwater.log.file.segments.sealed_segment import Sealed, sealed_name
from headwater.log.file.segments.segment import Segment, segment_name
from headwater.log.file.store import LocalStore
from headwater.log.port.store import Bounds, Store
from headwater.log.port.topic import Topic, topic_to_json
from headwater.model.clock import Clock
from headwater.model.errors import Damaged, Diverged, InvalidInput, LogNotFound, StorageError, Unsupported

TRIES = 5
SMALL_FILE_BYTES = 1 << 20
SPOOL_BYTES = 16 << 20

_LOG_FILES = {
    "headwater",
    "state",
    "commits",
    "commit.lock",
    "catalog.lock",
    "incarnations",
    "topics",
    "producers",
    "staged",
}
_TOPIC_FILES = {"topic", "signal"}
_PARTITION_FILES = {"head", "lock", "sync", "seal", "reserve"}
_SEGMENT_FILE = re.compile(r"\d{20}\.(frames|arrow|index)")
_LOOKS_MAX = 10


class BackedUp(msgspec.Struct, frozen=True):
    """What a backup has done: its moment, what it holds, and how much of that was copied, linked or there already."""

    taken_us: int = 0
    topics: int = 0
    events: int = 0
    copied: int = 0
    linked: int = 0
    kept: int = 0
    copied_bytes: int = 0


def back_up(store: Store, to: str, *, clock: Clock, on_progress: Callable[[BackedUp], None] | None = None) -> BackedUp:
    """Takes a backup into a folder or a URL."""
    if store.capabilities.folder is None:
        raise Unsupported(
            f"A backup copies files, and {store.url} has none.",
            advice="Mirror it into a file:// log, and back up that.",
        )
    assert isinstance(store, LocalStore)
    check_apart(store.url, to)
    vault = open_vault(to, store.disk)
    names = vault.names()
    foreign = [name for name in names if not (_is_manifest(name) or _is_ours(name))]
    if foreign and not any(map(_is_manifest, names)):
        raise InvalidInput(
            f"{vault.url} is not empty and is not a backup: it holds {foreign[0]}.",
            advice="Back up into a folder of its own.",
        )
    with vault.locked():
        return _Backup(store, vault, clock, on_progress).run()


def newest_manifest(vault: Vault) -> Manifest | None:
    """The manifest that counts: the newest whole one. `Damaged` where there are some and none is whole."""
    failure: Damaged | None = None
    for name in sorted(filter(_is_manifest, vault.names()), reverse=True):
        try:
            return _read_manifest(vault, name)
        except Damaged as error:
            failure = failure or error
        except FileNotFoundError:  # a newer one has replaced it since
            return newest_manifest(vault)
    if failure is not None:
        raise failure
    return None


def _read_manifest(vault: Vault, name: str) -> Manifest:
    return decode_manifest(b"".join(vault.pieces(name)), f"{vault.url}/{name}")


class _Moved(Exception):
    """A file of the log went away while it was to be copied; the snapshot has to be taken again."""


class _Snapshot(msgspec.Struct):
    """The log at one moment: all but the segments is in the manifest, and what goes with it."""

    manifest: Manifest
    topics: list[Topic]
    bounds: dict[tuple[str, int], Bounds]
    others: Any


class _Backup:
    def __init__(
        self, store: LocalStore, vault: Vault, clock: Clock, on_progress: Callable[[BackedUp], None] | None
    ) -> None:
        self._store = store
        self._disk = store.disk
        self._vault = vault
        self._clock = clock
        self._on_progress = on_progress or (lambda progress: None)
        self._done = BackedUp()
        self._stamp = ""
        self._before: dict[tuple[str, int, int, int], SegmentCopy] = {}

    def run(self) -> BackedUp:
        try:
            log_id = read_text(self._disk, f"{self._store.folder}/headwater", "log")["id"]
        except FileNotFoundError:
            raise LogNotFound(f"The log in {self._store.folder} is gone.", advice=GONE) from None
        earlier = newest_manifest(self._vault)
        if earlier is not None and earlier.log_id != log_id:
            raise Diverged(
                f"{self._vault.url} holds a backup of another log.", advice="Back up each log into a folder of its own."
            )
        self._remove_unneeded(earlier)
        self._disk.reach("backup: begun")
        for attempt in range(TRIES):
            try:
                manifest = self._copy(log_id, earlier)
                break
            except _Moved as error:
                if attempt == TRIES - 1:
                    raise StorageError(f"Files of the log disappear while they are copied: {error}.") from None
        self._vault.put(manifest_name(manifest.taken_us), [encode_manifest(manifest)])
        self._disk.reach("backup: manifest written")
        self._remove_unneeded(manifest)
        self._disk.reach("backup: old files removed")
        return self._done

    def _copy(self, log_id: str, earlier: Manifest | None) -> Manifest:
        with ExitStack() as held:
            snapshot = self._snapshot(log_id, earlier, held)
            self._disk.reach("backup: snapshot taken")
            self._stamp = f"{snapshot.manifest.taken_us:020d}"
            self._before = _by_place(earlier)
            self._done = BackedUp(snapshot.manifest.taken_us)
            topics = {topic.name: self._copy_topic(topic, snapshot.bounds) for topic in snapshot.topics}
            others_file = self._copy_others(snapshot.others) if snapshot.manifest.others else None
        manifest = msgspec.structs.replace(snapshot.manifest, topics=topics, others_file=others_file)
        self._done = msgspec.structs.replace(self._done, topics=len(topics), events=manifest.events)
        self._on_progress(self._done)
        return manifest

    # The snapshot

    def _snapshot(self, log_id: str, earlier: Manifest | None, held: ExitStack) -> _Snapshot:
        folder = self._store.folder
        spool: IO[bytes] = held.enter_context(tempfile.SpooledTemporaryFile(SPOOL_BYTES))  # noqa: SIM115 - `held` closes it
        with self._store.standing_still():
            topics = [self._store.refresh(name) for name in self._store.topics()]
            for topic in topics:
                for number in range(topic.partitions):
                    seal = self._disk.open(f"{folder}/topics/{topic.name}/{number}/seal", "write")
                    held.callback(seal.close)
                    seal.lock()
            with self._store.between_transactions() as state:
                folders, others = self._read_others(topics, spool)
                bounds = dict(self._store.bounds([topic.name for topic in topics]))
            manifest = Manifest(
                log_id=log_id,
                taken_us=max(self._clock(), earlier.taken_us + 1 if earlier else 0),
                incarnation=state.incarnation,
                incarnations=read_incarnations(self._disk, folder),
                transaction=state.transaction,
                topics={},
                producers=self._epochs(),
                folders=folders,
                others=others,
                others_file=None,
            )
        return _Snapshot(manifest, topics, bounds, spool)

    def _epochs(self) -> dict[str, int]:
        """The epochs of named producers; read after the bounds, so that none is older than the events."""
        folder = f"{self._store.folder}/producers"
        epochs = {}
        for name in sorted(self._disk.names(folder)):
            if not name.endswith((".lock", ".new")):
                fence = Fence(self._disk, f"{folder}/{name}", b"")
                try:
                    epochs[name] = fence.epoch()
                finally:
                    fence.close()
        return epochs

    def _read_others(self, topics: list[Topic], spool: IO[bytes]) -> tuple[list[str], list[OtherFile]]:
        """Every file that the log's own modules do not account for, one after the other into one file."""
        folders: list[str] = []
        found: list[OtherFile] = []
        for path in self._other_paths(topics, folders):
            position, size, crc = spool.tell(), 0, 0
            try:
                for piece in self._still_pieces(f"{self._store.folder}/{path}"):
                    spool.write(piece)
                    size, crc = size + len(piece), crc32c(piece, crc)
            except FileNotFoundError:
                spool.seek(position)
                continue
            found.append(OtherFile(path, position, size, crc))
        spool.truncate()
        return folders, found

    def _other_paths(self, topics: list[Topic], folders: list[str]) -> Iterator[str]:
        yield from self._unknown("", _LOG_FILES, folders)
        for topic in topics:
            numbers = {str(number) for number in range(topic.partitions)}
            yield from self._unknown(f"topics/{topic.name}/", _TOPIC_FILES | numbers, folders)
            for number in range(topic.partitions):
                yield from self._unknown(f"topics/{topic.name}/{number}/", _PARTITION_FILES, folders)

    def _unknown(self, folder: str, known: set[str], folders: list[str]) -> Iterator[str]:
        for name in sorted(self._disk.names(f"{self._store.folder}/{folder}".rstrip("/"))):
            path = f"{folder}{name}"
            if name in known or _SEGMENT_FILE.fullmatch(name) or name.startswith("."):
                continue
            if is_folder(self._disk, f"{self._store.folder}/{path}"):
                folders.append(path)
                yield from self._unknown(f"{path}/", set(), folders)
            elif not name.endswith(".new"):  # a draft; but a group or a topic may have such a name
                yield path

    def _still_pieces(self, path: str) -> Iterator[bytes]:
        """A small file as two looks in a row have seen it, since its owners may write to it without our locks."""
        file = self._disk.open(path)
        try:
            small = file.size() <= SMALL_FILE_BYTES
        finally:
            file.close()
        if not small:
            yield from file_pieces(self._disk, path)
            return
        seen = b"".join(file_pieces(self._disk, path))
        for _ in range(_LOOKS_MAX):
            again = b"".join(file_pieces(self._disk, path))
            if again == seen:
                break
            seen = again
        yield seen

    # The files

    def _copy_topic(self, topic: Topic, bounds: dict[tuple[str, int], Bounds]) -> TopicCopy:
        try:
            copies = [self._copy_partition(topic, n, bounds[topic.name, n]) for n in range(topic.partitions)]
        except FileNotFoundError as error:
            raise _Moved(str(error)) from None
        return TopicCopy(topic_to_json(topic), copies)

    def _copy_partition(self, topic: Topic, number: int, bound: Bounds) -> PartitionCopy:
        folder = f"{self._store.folder}/topics/{topic.name}/{number}"
        kinds = segments(self._disk, folder)
        if self._disk.exists(
            f"{folder}/{segment_name(bound.end)}"
        ):  # what is begun beside it does not count yet (see `copies`)
            kinds[bound.end] = Segment
        bases = sorted(base for base in kinds if base < bound.end) or sorted(kinds)[:1]
        if bases and kinds[bases[-1]] is Sealed and bound.end in kinds:
            bases.append(bound.end)
        if not bases or kinds[bases[-1]] is Sealed:
            raise _Moved(f"{folder} has no segment that goes on at {bound.end}")
        # What lies in the archive stays there; a backup holds what the partition itself holds.
        first = bound.first if topic.archive is None else max(bound.first, bases[0])
        if bases[0] > first:
            raise _Moved(f"{folder} no longer has event {first}")
        copies = []
        for base, end in pairwise(bases):
            if end > first:
                copies.append(self._copy_closed(topic, number, folder, base, end, is_sealed=kinds[base] is Sealed))
        last, mark = self._copy_last(topic, number, folder, bases[-1], bound.end)
        return PartitionCopy(min(first, bound.end), mark, [*copies, last])

    def _copy_closed(
        self, topic: Topic, number: int, folder: str, base: int, end: int, *, is_sealed: bool
    ) -> SegmentCopy:
        """A closed segment, which never changes: kept from an earlier backup, linked, or copied."""
        name = sealed_name(base) if is_sealed else segment_name(base)
        path = f"{folder}/{name}"
        sealed = Sealed(self._disk, folder, base) if is_sealed else None
        digest = "" if sealed is None else _digest(sealed)
        known = self._before.get((topic.id, number, base, end))
        if known is not None and self._is_same(known, path, digest=digest):
            return self._kept(msgspec.structs.replace(known, digest=digest))
        if sealed is not None:
            for failure in sealed.check_batches(topic):
                raise failure
            if sealed.end_offset != end:
                raise damaged(sealed.path, 0, f"events {sealed.end_offset} to {end - 1} are missing behind it")
        else:
            mark_at(Segment(self._disk, folder, base), end)
        stored = f"{self._stamp}/{topic.name}/{number}/{name}"
        if self._vault.link(path, stored):
            copied = StoredFile(stored, *_size_and_crc(file_pieces(self._disk, path)))
            self._count(linked=1)
        else:
            copied = self._put(stored, file_pieces(self._disk, path))
        self._disk.reach("backup: segment copied")
        return SegmentCopy(base, end, "arrow" if is_sealed else "frames", copied.size, copied, digest)

    def _is_same(self, known: SegmentCopy, path: str, *, digest: str = "", end: int | None = None) -> bool:
        """Whether an earlier backup holds what a file has up to `end`: a digest of a sealed segment, or none for frames."""
        if (known.kind == "arrow") != bool(digest):
            return False
        if digest and known.digest:
            return digest == known.digest
        return (known.file.size, known.file.crc) == _size_and_crc(file_pieces(self._disk, path, end))

    def _copy_last(self, topic: Topic, number: int, folder: str, base: int, end: int) -> tuple[SegmentCopy, Mark]:
        """The newest segment up to the snapshot's end."""
        mark = mark_at(Segment(self._disk, folder, base), end)
        path = f"{folder}/{segment_name(base)}"
        known = self._before.get((topic.id, number, base, end))
        if known is not None and self._is_same(known, path, end=mark.position):
            return self._kept(known), mark
        stored = f"{self._stamp}/{topic.name}/{number}/{segment_name(base)}"
        copied = self._put(stored, file_pieces(self._disk, path, mark.position))
        self._disk.reach("backup: last segment copied")
        return SegmentCopy(base, end, "frames", mark.position, copied), mark

    def _copy_others(self, spool: IO[bytes]) -> StoredFile:
        spool.seek(0)
        copied = self._put(f"{self._stamp}/others", iter(lambda: spool.read(SMALL_FILE_BYTES), b""))
        self._disk.reach("backup: others copied")
        return copied

    def _put(self, name: str, pieces: Iterator[bytes]) -> StoredFile:
        size = crc = 0

        def summed() -> Iterator[bytes]:
            nonlocal size, crc
            for piece in pieces:
                size, crc = size + len(piece), crc32c(piece, crc)
                yield piece

        self._vault.put(name, summed())
        self._count(copied=1, copied_bytes=size)
        return StoredFile(name, size, crc)

    def _kept(self, known: SegmentCopy) -> SegmentCopy:
        if self._vault.size(known.file.name) != known.file.size:
            raise Damaged(
                f"{self._vault.url}/{known.file.name} is missing or has another length than its backup says.",
                advice="The backup there is no longer whole. Take a new one into an empty folder.",
            )
        self._count(kept=1)
        return known

    def _count(self, **more: int) -> None:
        counts: dict[str, Any] = {name: getattr(self._done, name) + count for name, count in more.items()}
        self._done = msgspec.structs.replace(self._done, **counts)
        self._on_progress(self._done)

    def _remove_unneeded(self, manifest: Manifest | None) -> None:
        """Removes what the backup that counts does not need: older ones, and what a crash left behind.

        An older one that somebody restores stays whole; the next backup looks again.
        """
        needed = _needed(manifest) if manifest else set()
        names = self._vault.names()
        with ExitStack() as held:
            for name in filter(_is_manifest, names):
                if name not in needed and not held.enter_context(self._vault.held(name, alone=True)):
                    with suppress(Damaged, FileNotFoundError):
                        needed |= _needed(_read_manifest(self._vault, name))
            for name in [*filter(_is_manifest, names), *(name for name in names if not _is_manifest(name))]:
                if name not in needed and (_is_manifest(name) or _is_ours(name)):
                    self._vault.remove(name)
                    self._disk.reach("backup: one removed")
            self._vault.tidy()


def _needed(manifest: Manifest) -> set[str]:
    """The files of a backup, its manifest included."""
    return {file.name for file in manifest.files()} | {manifest_name(manifest.taken_us)}


def _digest(sealed: Sealed) -> str:
    """What a sealed segment says of its content: the offsets, times and checksum of each of its batches."""
    table = (sealed.base, sealed.end_offset, sealed.schema_id, sealed.flags, sealed.compacted, sealed.batches)
    return hashlib.blake2b(msgspec.json.encode(table), digest_size=16).hexdigest()


def _size_and_crc(pieces: Iterator[bytes]) -> tuple[int, int]:
    size = crc = 0
    for piece in pieces:
        size, crc = size + len(piece), crc32c(piece, crc)
    return size, crc


def mark_at(segment: Segment, end: int) -> Mark:
    """The mark at an offset of a segment, after every frame before it was checked."""
    try:
        header = segment.header
        mark = Mark(header.base, header.base, segment.start, header.running, header.appended, header.chain)
        while mark.end < end:
            frame = segment.frame_at(mark.position)
            if frame is None or (frame.base_offset, frame.chain) != (mark.end, mark.chain):
                raise damaged(segment.path, mark.position, f"event {mark.end} is not where it should be")
            if not segment.is_intact(frame, mark.position):
                raise damaged(segment.path, mark.position, f"events {frame.base_offset} to {frame.end_offset - 1}")
            mark = mark.behind(frame)
        if mark.end != end:
            raise damaged(segment.path, mark.position, f"no frame ends before event {end}")
        return mark
    finally:
        segment.close()


def _by_place(manifest: Manifest | None) -> dict[tuple[str, int, int, int], SegmentCopy]:
    """The segments of an earlier backup, by topic id, partition and offsets."""
    return {
        (str(copy.topic["id"]), number, segment.base, segment.end): segment
        for copy in (manifest.topics.values() if manifest else ())
        for number, partition in enumerate(copy.partitions)
        for segment in partition.segments
    }


def _is_manifest(name: str) -> bool:
    return re.fullmatch(r"manifest-\d{20}", name) is not None


def _is_ours(name: str) -> bool:
    return re.match(r"(\d{20}/|manifest-\d{20}\.new)", name) is not None
