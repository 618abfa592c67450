"""Restoring: makes a log of a backup, in a folder that is empty or not there yet.

The log is made whole beside its place, under a name that starts with a dot, and renamed at the end: whatever goes wrong, there is
either the restored log or nothing. Every file must be there with its length before the first is copied, and its crc32c is
checked while it is. What a crash left under the name with the dot is removed by the next try, and all else that goes wrong leaves nothing.

A backup may run meanwhile: a restore holds the manifest that it reads, and that backup stays whole as long as it does. In a bucket nothing
can be held; a restore whose backup was replaced begins again with the newer one.

A restored log is a later incarnation of the log that was backed up, with an id of its own (see docs/decisions/0005): positions that
were saved behind the backup's end raise `PositionLost` instead of naming other events.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
from crc32c import crc32c

from headwater.log.copies.backup import newest_manifest
from headwater.log.copies.manifest import Manifest, OtherFile, PartitionCopy, StoredFile, TopicCopy, manifest_name
from headwater.log.copies.mirror import check_apart
from headwater.log.copies.vault import Vault, is_folder, make_folders, open_vault
from headwater.log.disk.disk import Disk, File, RealDisk
from headwater.log.disk.fence import create_fence
from headwater.log.disk.text import write_text
from headwater.log.file.commit import create_commits, create_state
from headwater.log.file.partition.head import create_head
from headwater.log.file.recovery import INCARNATIONS_MAX
from headwater.log.file.segments.sealed_segment import sealed_name
from headwater.log.file.segments.segment import segment_name
from headwater.log.port.topic import check_name, topic_from_json
from headwater.model.clock import Clock, system_clock
from headwater.model.errors import (
    Conflict,
    Damaged,
    InvalidInput,
    NotFound,
    StorageError,
    Unsupported,
)

NAMED_MAX = 5
TRIES = 5


class Restored(msgspec.Struct, frozen=True):
    """What was restored: the moment of the backup, and what the log holds now."""

    taken_us: int
    topics: int
    events: int
    files: int
    bytes: int


def restore_log(
    backup: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    disk: Disk | None = None,
    clock: Clock = system_clock,
    on_progress: Callable[[Restored], None] | None = None,
) -> Restored:
    """Makes the log of a backup in an empty or new folder; a backup that is not whole is refused and nothing is left."""
    disk = disk or RealDisk()
    backup, to = os.fspath(backup), os.fspath(to)
    if "://" in to and not to.startswith("file://"):
        raise Unsupported(f"{to} is not a folder.", advice="Restore into a folder, and mirror from there.")
    folder = os.path.abspath(to.removeprefix("file://"))
    check_apart(backup, folder)
    vault = open_vault(backup, disk)
    for _ in range(TRIES):
        with _held_manifest(vault, backup) as manifest:
            try:
                _check_empty(disk, folder)
                _check_files(vault, manifest)
                return _Restore(disk, vault, manifest, folder, clock, on_progress).run()
            except StorageError:
                if vault.size(manifest_name(manifest.taken_us)) is not None:
                    raise
    raise Conflict(
        f"Newer backups have replaced the one in {vault.url} {TRIES} times while it was read.",
        advice="Nothing was restored. Restore it when no backup runs.",
    )


@contextmanager
def _held_manifest(vault: Vault, backup: str) -> Iterator[Manifest]:
    """The manifest that counts; no backup removes it or its files as long as it is held, where a vault can hold something."""
    for _ in range(TRIES):
        manifest = newest_manifest(vault)
        if manifest is None:
            raise NotFound(f"No backup was found in {backup}.", advice="Check the path; `headwater backup` makes one.")
        with vault.held(manifest_name(manifest.taken_us)) as is_held:
            if is_held:
                yield manifest
                return
    raise Conflict(f"Backups in {vault.url} keep replacing one another.", advice="Restore it when no backup runs.")


class _Restore:
    def __init__(
        self,
        disk: Disk,
        vault: Vault,
        manifest: Manifest,
        folder: str,
        clock: Clock,
        on_progress: Callable[[Restored], None] | None,
    ) -> None:
        self._disk = disk
        self._vault = vault
        self._manifest = manifest
        self._folder = folder
        self._clock = clock
        self._on_progress = on_progress or (lambda progress: None)
        above, name = os.path.split(folder)
        self._fresh = f"{above}/.{name}.restoring"
        self._done = Restored(manifest.taken_us, len(manifest.topics), manifest.events, 0, 0)

    def run(self) -> Restored:
        make_folders(self._disk, self._fresh)
        try:
            lock = self._disk.open(f"{self._fresh}/catalog.lock", "create")
        except FileNotFoundError:
            raise self._taken() from None
        try:
            if not lock.lock(wait=False) or not self._disk.exists(self._fresh):
                raise self._taken()
            try:
                self._remove_leftovers()
                self._make_log()
                self._disk.reach("restore: complete")
                self._disk.rename(self._fresh, self._folder)
            except BaseException:
                with suppress(StorageError):
                    self._disk.remove_folder(self._fresh)
                raise
            self._disk.sync_folder(os.path.dirname(self._folder))
            self._disk.reach("restore: named")
            return self._done
        finally:
            lock.close()

    def _taken(self) -> Conflict:
        return Conflict(f"Another restore into {self._folder} is running.", advice="Wait until it has ended.")

    def _remove_leftovers(self) -> None:
        """What another try left when it died; its lock is ours now."""
        for name in self._disk.names(self._fresh):
            path = f"{self._fresh}/{name}"
            if is_folder(self._disk, path):
                self._disk.remove_folder(path)
            elif name != "catalog.lock":
                self._disk.remove(path)

    def _make_log(self) -> None:
        manifest, folder = self._manifest, self._fresh
        for name in ("topics", "producers", *manifest.folders):
            self._disk.make_folder(f"{folder}/{_inside(name)}")
        for name, copy in manifest.topics.items():
            self._make_topic(check_name(name), copy)
            self._disk.reach("restore: topic made")
        self._make_others()
        for producer, epoch in manifest.producers.items():
            create_fence(self._disk, f"{folder}/producers", _inside(producer), epoch)
        self._disk.open(f"{folder}/commit.lock", "create").close()
        incarnation = max(manifest.incarnation + 1, self._clock())
        ends = {
            f"{name}/{number}": partition.mark.end
            for name, copy in manifest.topics.items()
            for number, partition in enumerate(copy.partitions)
        }
        entries = [*manifest.incarnations, {"incarnation": incarnation, "at": self._clock(), "ends": ends}]
        write_text(self._disk, f"{folder}/incarnations", "incarnations", entries[-INCARNATIONS_MAX:])
        create_commits(self._disk, folder, floor=manifest.transaction)
        boot_id = self._disk.boot_id()
        create_state(self._disk, folder, boot_id=boot_id, incarnation=incarnation, transaction=manifest.transaction)
        self._disk.reach("restore: state made")
        origin = {"id": uuid.uuid4().hex, "restored_from": manifest.log_id, "taken": manifest.taken_us}
        write_text(self._disk, f"{folder}/headwater", "log", origin)
        for name in ("topics", "producers", *manifest.folders):
            self._disk.sync_folder(f"{folder}/{name}")
        self._disk.sync_folder(folder)

    def _make_topic(self, name: str, copy: TopicCopy) -> None:
        folder = f"{self._fresh}/topics/{name}"
        topic = topic_from_json(copy.topic)
        if topic.name != name or topic.partitions != len(copy.partitions):
            raise _not_whole(self._vault, f"topic {name!r} is described in two ways")
        self._disk.make_folder(folder)
        for number, partition in enumerate(copy.partitions):
            self._make_partition(f"{folder}/{number}", partition)
        self._write(f"{folder}/signal", iter([b"!"]))
        write_text(self._disk, f"{folder}/topic", "topic", copy.topic)

    def _make_partition(self, folder: str, copy: PartitionCopy) -> None:
        self._disk.make_folder(folder)
        for name in ("lock", "sync", "seal"):
            self._disk.open(f"{folder}/{name}", "create").close()
        for segment in copy.segments:
            name = segment_name(segment.base) if segment.kind == "frames" else sealed_name(segment.base)
            self._write(f"{folder}/{name}", self._checked(segment.file))
            self._disk.reach("restore: segment copied")
        create_head(self._disk, f"{folder}/head", copy.mark, first=copy.first)
        self._disk.sync_folder(folder)

    def _make_others(self) -> None:
        """The files beside the topics, cut out of the one that holds them all."""
        whole = self._manifest.others_file
        if whole is None:
            return
        path = f"{self._fresh}/.others"
        self._write(path, self._checked(whole))
        source = self._disk.open(path)
        try:
            for other in self._manifest.others:
                self._write(f"{self._fresh}/{_inside(other.path)}", _cut(source, other))
        finally:
            source.close()
        self._disk.remove(path)
        self._disk.reach("restore: others made")

    def _checked(self, file: StoredFile) -> Iterator[bytes]:
        """A file's bytes; `Damaged` behind the last where they are not those that were stored."""
        size = crc = 0
        try:
            for piece in self._vault.pieces(_inside(file.name)):
                size, crc = size + len(piece), crc32c(piece, crc)
                yield piece
        except FileNotFoundError:
            raise _not_whole(self._vault, f"{file.name} is missing") from None
        if (size, crc) != (file.size, file.crc):
            raise _not_whole(self._vault, f"{file.name} is damaged: its checksum does not hold")
        self._done = msgspec.structs.replace(self._done, files=self._done.files + 1, bytes=self._done.bytes + size)
        self._on_progress(self._done)

    def _write(self, path: str, pieces: Iterator[bytes]) -> None:
        file = self._disk.open(path, "create")
        try:
            position = 0
            for piece in pieces:
                file.write_at(position, [piece])
                position += len(piece)
            file.sync()
        finally:
            file.close()


def _check_empty(disk: Disk, folder: str) -> None:
    try:
        found = disk.names(folder) if disk.exists(folder) else []
    except StorageError:
        found = [os.path.basename(folder)]
    if found:
        raise InvalidInput(
            f"{folder} is not empty: it holds {min(found)}.",
            advice="Restore into a new folder; a restore never overwrites a log.",
        )


def _check_files(vault: Vault, manifest: Manifest) -> None:
    """Names every file that is missing or has another length, before anything is copied."""
    wrong = []
    for file in manifest.files():
        size = vault.size(_inside(file.name))
        if size != file.size:
            wrong.append(f"{file.name} is missing" if size is None else f"{file.name} has {size} bytes of {file.size}")
    if wrong:
        more = f"; and {len(wrong) - NAMED_MAX} more" if len(wrong) > NAMED_MAX else ""
        raise _not_whole(vault, "; ".join(wrong[:NAMED_MAX]) + more)


def _cut(source: File, other: OtherFile) -> Iterator[bytes]:
    position, end = other.position, other.position + other.size
    while position < end:
        piece = source.read_at(position, min(1 << 20, end - position))
        position += len(piece)
        yield piece


def _inside(name: str) -> str:
    """A path of the manifest, which may lead nowhere but inside."""
    if os.path.isabs(name) or ".." in name.split("/"):
        raise Damaged(f"A backup names the file {name!r}, which lies outside.", advice="Do not use this backup.")
    return name


def _not_whole(vault: Vault, what: str) -> Damaged:
    return Damaged(
        f"The backup in {vault.url} is not whole: {what}.",
        advice="Nothing was restored. Use another copy of the backup, or a mirror.",
    )
