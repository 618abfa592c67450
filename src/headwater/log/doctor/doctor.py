"""The doctor: looks at every byte of a local log, says what is wrong, and repairs what is safe.

Safe means: what can be made again from what is whole. A head or the shared state from the frames, an index by deleting it,
Arrow's footer of a sealed segment from its batches, the manifest of an archive from its files, a lock that is gone (it has no content, and
nobody holds it), leftovers of a crash by removing them. A
queue's window that cannot be right is removed: its events come again, which loses nothing. Events that fail their checksum are named and
left alone: only a mirror or a backup has them.

Repairs expect that no other program has the log open; examining does not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Literal

import msgspec

from headwater.log.copies.vault import is_folder
from headwater.log.disk.disk import Disk, RealDisk
from headwater.log.disk.fence import check_fence
from headwater.log.disk.text import read_text
from headwater.log.doctor.archive import archive_checks
from headwater.log.doctor.groups import group_checks
from headwater.log.doctor.queues import queue_checks
from headwater.log.file.commit import CommitLog, create_commits, create_state
from headwater.log.file.cursor import segments
from headwater.log.file.groups import group_names
from headwater.log.file.partition.head import Head, Mark
from headwater.log.file.recovery import (
    check_recovered,
    last_boot_id,
    read_incarnations,
    read_unrecovered,
    recover_closed,
    recover_partition,
)
from headwater.log.file.segments.index import load_index
from headwater.log.file.segments.sealed_segment import Sealed, encode_sealed, sealed_name
from headwater.log.file.segments.segment import Segment, segment_name
from headwater.log.file.stages import stage_checks, stage_names
from headwater.log.file.upkeep.seal import write_sealed
from headwater.log.port.topic import Topic, topic_from_json
from headwater.model.errors import Damaged, HeadwaterError, LogNotFound

Severity = Literal["warning", "error"]

_ADVISES_ITSELF = "`headwater doctor"


class Finding(msgspec.Struct, frozen=True):
    """Something that is not as it should be; `note` says what its repair means."""

    severity: Severity
    path: str
    what: str
    advice: str
    repaired: bool = False
    note: str = ""


class Report(msgspec.Struct):
    """What an examination has seen."""

    findings: list[Finding] = []
    files: int = 0
    events: int = 0
    bytes: int = 0

    @property
    def healthy(self) -> bool:
        """Whether every error was repaired."""
        return all(finding.repaired for finding in self.findings if finding.severity == "error")


def examine(
    folder: str,
    *,
    repair: bool = False,
    disk: Disk | None = None,
    on_progress: Callable[[str], None] = lambda path: None,
) -> Report:
    """Checks every file of the log in a folder."""
    disk = disk or RealDisk()
    folder = folder.removeprefix("file://").rstrip("/")
    if not disk.exists(f"{folder}/headwater"):
        raise LogNotFound(f"No log exists in {folder}.", advice="Check the path.")
    examination = _Examination(disk, folder, repair=repair, on_progress=on_progress)
    examination.run()
    return examination.report


class _Examination:
    def __init__(self, disk: Disk, folder: str, *, repair: bool, on_progress: Callable[[str], None]) -> None:
        self.report = Report()
        self._disk = disk
        self._folder = folder
        self._repair = repair
        self._on_progress = on_progress

    def run(self) -> None:
        self._log_files()
        self._leftovers(self._folder)
        for name in ("producers", "groups", "queues", "stages"):
            self._drafts(f"{self._folder}/{name}")
        self._leftovers(f"{self._folder}/topics")
        for name in sorted(self._disk.names(f"{self._folder}/topics")):
            if not name.startswith("."):
                self._topic(name)

    def _log_files(self) -> None:
        for name in ("catalog.lock", "commit.lock"):
            path = f"{self._folder}/{name}"
            self._check(path, partial(self._open, path), mend=partial(self._create, path))
        for name in ("topics", "producers"):
            path = f"{self._folder}/{name}"
            self._check(path, partial(self._disk.names, path), mend=partial(self._disk.make_folder, path))
        self._check(f"{self._folder}/headwater", lambda: read_text(self._disk, f"{self._folder}/headwater", "log"))
        self._check(f"{self._folder}/incarnations", lambda: read_incarnations(self._disk, self._folder))
        unrecovered = f"{self._folder}/unrecovered"
        self._check(
            unrecovered,
            lambda: check_recovered(read_unrecovered(self._disk, self._folder)),
            mend=lambda: check_recovered(recover_closed(self._disk, self._folder)),
        )
        self._check(f"{self._folder}/state", lambda: last_boot_id(self._disk, self._folder), mend=self._mend_state)
        self._check(
            f"{self._folder}/commits", self._read_commits, mend=lambda: create_commits(self._disk, self._folder)
        )
        for name in sorted(self._disk.names(f"{self._folder}/producers")):
            if not name.endswith((".lock", ".new")):
                path = f"{self._folder}/producers/{name}"
                self._check(path, partial(check_fence, self._disk, path))
        folder = self._folder
        for name in [
            *(f"groups/{group}/lock" for group in group_names(self._disk, f"{folder}/groups")),
            *(f"stages/{stage}/lock" for stage in stage_names(self._disk, f"{folder}/stages")),
        ]:
            path = f"{folder}/{name}"
            self._check(path, partial(self._open, path), mend=partial(self._create, path))
        checks = (group_checks, queue_checks, stage_checks)
        for path, look, mend in chain.from_iterable(check(self._disk, folder) for check in checks):
            self._check(path, look, mend=mend)

    def _topic(self, name: str) -> None:
        folder = f"{self._folder}/topics/{name}"
        found: list[Topic] = []
        if not self._is_folder(folder):
            return
        self._check(
            f"{folder}/topic", lambda: found.append(topic_from_json(read_text(self._disk, f"{folder}/topic", "topic")))
        )
        if not is_folder(self._disk, folder):
            return
        self._leftovers(folder)
        path = f"{folder}/signal"
        self._check(path, partial(self._open, path), mend=partial(self._create, path, b"!"))
        for topic in found:
            for number in range(topic.partitions):
                self._partition(f"{folder}/{number}", topic, number)

    def _partition(self, folder: str, topic: Topic, number: int) -> None:
        if not self._disk.exists(folder):
            self._seen(folder)
            self._add(folder, "is missing", advice="Restore it from a mirror or a backup.")
            return
        if not self._is_folder(folder):
            return
        self._leftovers(folder)
        for name in ("lock", "sync", "seal"):
            path = f"{folder}/{name}"
            self._check(path, partial(self._open, path), mend=partial(self._create, path))
        marks: list[Mark] = []
        firsts: list[int] = []
        self._check(
            f"{folder}/head",
            lambda: self._read_head(folder, marks, firsts),
            mend=lambda: self._mend_head(folder),
        )
        if not marks and self._repair:
            with suppress(HeadwaterError, FileNotFoundError):
                self._read_head(folder, marks, firsts)
        if topic.archive is not None and firsts:
            for path, look, mend in archive_checks(topic, number, first=firsts[0], oldest=firsts[1]):
                self._check(path, look, mend=mend)
        kinds = segments(self._disk, folder)
        names = set(self._disk.names(folder))
        self._leave_out_begun(folder, kinds, names)
        expected: int | None = firsts[0] if firsts else 0
        before = folder
        for base in sorted(kinds):
            if firsts and base < firsts[0]:
                self._given_up(folder, base, names, "lies before the first offset")
                continue
            self._twins(folder, base, names)
            self._index(folder, base, names)
            if expected is not None and base < expected and kinds[base] is Sealed:
                self._given_up(folder, base, names, "is merged into the one before it")
                continue
            if expected is not None and base != expected:
                self._add(
                    before,
                    f"ends with event {expected - 1}; events {expected} to {base - 1} are missing",
                    advice="Restore them from a mirror or a backup.",
                )
            visible = marks[0] if marks and marks[0].base == base else None
            expected = self._segment(kinds[base], folder, base, topic, number, visible)
            before = f"{folder}/{(sealed_name if kinds[base] is Sealed else segment_name)(base)}"
        if marks and marks[0].base not in kinds:
            self._add(
                f"{folder}/{marks[0].base:020d}.frames", "is missing", advice="Restore it from a mirror or a backup."
            )
        elif marks and expected is not None and expected < marks[0].end:
            self._add(
                folder,
                f"events {expected} to {marks[0].end - 1} were acknowledged and are gone",
                advice="Restore them from a mirror or a backup.",
            )

    def _leave_out_begun(self, folder: str, kinds: dict[int, type[Segment] | type[Sealed]], names: set[str]) -> None:
        """What a writer that died has begun, the next one removes: it stands for nothing (see `copies`)."""
        try:
            head = Head(self._disk, f"{folder}/head", writable=False)
        except (HeadwaterError, FileNotFoundError):
            return
        try:
            mark = head.written()
        except Damaged:
            return
        finally:
            head.close()
        begun = [] if mark.rolling < 0 else [segment_name(mark.rolling)]
        if mark.rolling > mark.end:
            begun.append(sealed_name(mark.end))
            kinds[mark.end] = Segment
        for name in names.intersection(begun):
            self._add(
                f"{folder}/{name}", "was begun by a writer that died", advice="It does no harm.", severity="warning"
            )
            names.discard(name)
        if mark.rolling >= 0:
            kinds.pop(mark.rolling, None)

    def _segment(
        self, kind: type[Segment] | type[Sealed], folder: str, base: int, topic: Topic, number: int, active: Mark | None
    ) -> int | None:
        """Checks one segment; returns the offset behind its last event, or None where that cannot be said."""
        opened: list[Segment | Sealed] = []
        path = f"{folder}/{base:020d}"
        self._check(path, lambda: opened.append(kind(self._disk, folder, base)))
        if not opened:
            return None
        segment = opened[0]
        self.report.bytes += self._size(segment.path)
        try:
            if isinstance(segment, Sealed):
                return self._sealed(segment, folder, topic, number)
            return self._frames(segment, topic, number, active)
        finally:
            segment.close()

    def _frames(self, segment: Segment, topic: Topic, number: int, active: Mark | None) -> int:
        end = active.position if active else segment.size()
        offset, chain, position = segment.base, segment.header.chain, segment.start
        while position < end:
            frame = segment.frame_at(position)
            if frame is None or frame.chain != chain or frame.base_offset != offset:
                self._add(
                    segment.path,
                    f"the frame of event {offset} at byte {position} is damaged; what follows it cannot be read",
                    advice="Restore the partition from a mirror or a backup.",
                )
                break
            try:
                segment.read(position, topic=topic, partition=number)
            except HeadwaterError as error:
                self._add(segment.path, error.what, advice=error.advice)
            self.report.events += frame.count
            offset, chain, position = frame.end_offset, frame.header_crc, position + frame.stride
        return offset

    def _sealed(self, segment: Sealed, folder: str, topic: Topic, number: int) -> int:
        self.report.events += segment.count
        for error in segment.check_batches(topic):
            self._add(segment.path, error.what, advice=error.advice)
        for error in segment.check_footer(topic):
            mended = self._repair and self._reseal(segment, folder, topic, number)
            self._add(segment.path, error.what, advice=error.advice, repaired=mended)
        return segment.end_offset

    # Repairs

    def _mend_state(self) -> None:
        """Recovery puts the rest in order when the log is opened next."""
        entries = read_incarnations(self._disk, self._folder)
        incarnation = max((entry["incarnation"] for entry in entries), default=0)
        create_state(self._disk, self._folder, boot_id="", incarnation=incarnation)
        self._disk.sync_folder(self._folder)

    def _mend_head(self, folder: str) -> None:
        floor, found = self._read_commits()

        def decided(transaction: int) -> bool:
            return transaction in found or transaction <= floor

        recover_partition(self._disk, folder, decided=decided, decided_or_old=decided)

    def _reseal(self, segment: Sealed, folder: str, topic: Topic, number: int) -> bool:
        try:
            pieces = list(segment.pieces(topic, number))
        except Damaged:
            return False
        data = encode_sealed(pieces, topic=topic, compacted=segment.compacted)
        write_sealed(self._disk, folder, segment.base, data)
        return True

    def _leftovers(self, folder: str) -> None:
        for name in sorted(self._disk.names(folder)):
            path = f"{folder}/{name}"
            if name.startswith(".") or (name.endswith(".new") and not is_folder(self._disk, path)):
                self._left_over(path)

    def _drafts(self, folder: str) -> None:
        """Files that were to replace others; a producer, a group or a queue has them in folders of its own, which may have any name."""
        for name in sorted(self._disk.names(folder)) if self._disk.exists(folder) else ():
            path = f"{folder}/{name}"
            if is_folder(self._disk, path):
                self._drafts(path)
            elif name.endswith(".new"):
                self._left_over(path)

    def _left_over(self, path: str) -> None:
        if self._repair:
            if is_folder(self._disk, path):
                self._disk.remove_folder(path)
            else:
                self._disk.remove(path)
        self._add(path, "left over from a crash", advice="It does no harm.", severity="warning", repaired=self._repair)

    def _twins(self, folder: str, base: int, names: set[str]) -> None:
        if {f"{base:020d}.frames", f"{base:020d}.arrow"} <= names:
            path = f"{folder}/{base:020d}.frames"
            if self._repair:
                self._disk.remove(path)
            self._add(path, "is sealed already", advice="It does no harm.", severity="warning", repaired=self._repair)

    def _given_up(self, folder: str, base: int, names: set[str], what: str) -> None:
        """A segment that is no longer needed, which a crash left behind."""
        for name in (f"{base:020d}.{kind}" for kind in ("frames", "index", "arrow")):
            if name in names:
                if self._repair:
                    self._disk.remove(f"{folder}/{name}")
                self._add(
                    f"{folder}/{name}",
                    what,
                    advice="It does no harm, and is removed when the topic is next tidied.",
                    severity="warning",
                    repaired=self._repair,
                )

    def _index(self, folder: str, base: int, names: set[str]) -> None:
        path = f"{folder}/{base:020d}.index"
        if f"{base:020d}.index" not in names:
            return
        self._seen(path)
        if load_index(self._disk, path) is None:
            if self._repair:
                self._disk.remove(path)
            self._add(
                path,
                "is damaged",
                advice="It is not used and will be built again.",
                severity="warning",
                repaired=self._repair,
            )

    # Findings

    def _check(self, path: str, look: Callable[[], object], *, mend: Callable[[], object] | None = None) -> None:
        """Looks at one file; adds a finding when that fails, and mends it if it may."""
        self._seen(path)
        try:
            look()
        except FileNotFoundError as error:
            if self._disk.exists(path):
                self._mended(path, f"cannot be looked at: {error.filename or 'another file'} is missing", "", mend)
            else:
                self._mended(path, "is missing", "Restore it from a mirror or a backup.", mend)
        except HeadwaterError as error:
            self._mended(path, error.what, error.advice, mend)

    def _is_folder(self, path: str) -> bool:
        found: list[list[str]] = []
        self._check(path, lambda: found.append(self._disk.names(path)))
        return bool(found)

    def _mended(self, path: str, what: str, advice: str, mend: Callable[[], object] | None) -> None:
        """Adds a finding; a repair that is more than that gives a sentence about it."""
        repaired, note = False, ""
        if mend is not None and not self._repair:
            advice = "Close every program that uses this log, then run this with --repair."
        if self._repair and mend is not None:
            try:
                said = mend()
                repaired = True
                note = said if isinstance(said, str) else ""
            except (HeadwaterError, FileNotFoundError) as error:
                advice = f"{advice} The repair failed: {error}"
        self._add(path, what, advice=advice, repaired=repaired, note=note)

    def _add(
        self,
        path: str,
        what: str,
        *,
        advice: str,
        severity: Severity = "error",
        repaired: bool = False,
        note: str = "",
    ) -> None:
        if _ADVISES_ITSELF in advice:
            advice = "Nothing is left to do." if repaired else "Restore it from a mirror or a backup."
        self.report.findings.append(Finding(severity, path, what, advice, repaired, note))

    def _seen(self, path: str) -> None:
        self.report.files += 1
        self._on_progress(path)

    def _read_head(self, folder: str, marks: list[Mark], firsts: list[int]) -> None:
        head = Head(self._disk, f"{folder}/head", writable=False)
        try:
            head.written()
            head.is_poisoned()
            head.is_deleted()
            firsts += head.firsts()
            marks.append(head.durable())
        finally:
            head.close()

    def _read_commits(self) -> tuple[int, dict[int, object]]:
        commits = CommitLog(self._disk, self._folder, writable=False)
        try:
            floor, found = commits.decided()
            return floor, dict(found)
        finally:
            commits.close()

    def _open(self, path: str) -> None:
        self._disk.open(path).close()

    def _create(self, path: str, content: bytes = b"") -> None:
        file = self._disk.open(path, "create")
        try:
            file.write_at(0, [content])
            file.sync()
        finally:
            file.close()
        self._disk.sync_folder(path.rpartition("/")[0])

    def _size(self, path: str) -> int:
        file = self._disk.open(path)
        try:
            return file.size()
        finally:
            file.close()
