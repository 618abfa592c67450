"""Recovery: what the first process to open a log does after the machine stopped uncleanly.

A killed process needs none of this: what it wrote is still in the page cache, and the heads say how much of it counts. A
power loss is another matter: unsynced writes may be gone, torn or reordered, and a head may be older or newer than the
frames beside it. `durable` alone can be believed. So, for each partition: go on from its durable mark as long as frames are
whole, chained, and (if they belong to a transaction) recorded as committed, over into the next segment where one goes on
with the same chain; that is the new end, and everything behind it goes. The first offset is the greatest that is whole; what
lies below it was given up, whether its files are gone or not.

All partitions are recovered before the log is opened, so that no reader sees half of a transaction. The incarnation rises,
and `incarnations` keeps the end of each partition at that moment: a position from before that lies behind it is lost.

A partition that cannot be recovered keeps nobody from the others:
- one of which something is gone (its segment is missing, damaged, or shorter than its durable end) is damaged. Its head says how far it
  went, so that nobody writes behind what is missing; what is whole is read;
- one whose files cannot be reached (no rights, a bad sector) is closed: `unrecovered` (text) names it, why, and the transactions that were
  known to be committed. Nobody opens it until it is recovered, which each opening of the log and `headwater doctor --repair` try;
- a topic whose folder cannot be listed is closed as a whole: it stands there with the partition -1, beside those closed before;
- what no topic knows, because a split died before it happened, is no partition.

Room, descriptors and memory are lacked by the whole machine: without them the log is not opened, and recovered later.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from headwater.log.disk.disk import Disk
from headwater.log.disk.text import read_text, write_text
from headwater.log.file.commit import CommitLog, Decision
from headwater.log.file.groups import recover_groups
from headwater.log.file.partition.head import Head, Mark, create_head, is_marked_deleted
from headwater.log.file.partition.partition import ALL, bases_of, lost, remove_begun
from headwater.log.file.segments.frame import CONTINUES, Frame
from headwater.log.file.segments.segment import Segment, segment_name
from headwater.log.file.stages import recover_stages
from headwater.log.port.topic import topic_from_json
from headwater.model.clock import Clock
from headwater.model.errors import Damaged, DiskFull, FormatTooNew, StorageError

INCARNATIONS_MAX = 100

_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

Decided = Callable[[int], bool]
"""Whether a transaction is known to be committed."""


def last_boot_id(disk: Disk, folder: str) -> str:
    """The boot of the machine in which the log was last found in order; empty where a power loss tore the answer."""
    commits = CommitLog(disk, folder, writable=False)
    try:
        return commits.state().boot_id.rstrip(b"\0").decode("ascii")
    except Damaged:
        if commits.is_torn():
            return ""
        raise
    finally:
        commits.close()


def recover_log(disk: Disk, folder: str, *, clock: Clock) -> Counter[str]:
    """Recovers every partition, unless another process has done so; the caller holds the lock of the catalog."""
    boot_id = disk.boot_id()
    counters: Counter[str] = Counter()
    if last_boot_id(disk, folder) == boot_id:
        return counters
    counters["recoveries"] += 1
    entries = read_incarnations(disk, folder)
    incarnation = max((entry["incarnation"] for entry in entries), default=0) + 1
    commits = CommitLog(disk, folder, writable=True)
    try:
        with commits.locked():
            floor, found = commits.decided()
            ends, closed = _recover_partitions(disk, folder, floor=floor, found=found, counters=counters)
            _write_unrecovered(disk, folder, closed)
            recover_groups(disk, folder, found)
            recover_stages(disk, folder, found)
            entries.append({"incarnation": incarnation, "at": clock(), "ends": ends})
            write_text(disk, f"{folder}/incarnations", "incarnations", entries[-INCARNATIONS_MAX:])
            disk.reach("recovery: incarnation written")
            commits.recovered(boot_id=boot_id, incarnation=incarnation, floor=max([floor, *found]))
    finally:
        commits.close()
    return counters


def read_incarnations(disk: Disk, folder: str) -> list[dict[str, Any]]:
    """What each unclean stop left: the incarnation after it, and the end of each partition."""
    try:
        entries: list[dict[str, Any]] = read_text(disk, f"{folder}/incarnations", "incarnations")
        return entries
    except FileNotFoundError:
        return []


class Unrecovered(msgspec.Struct, frozen=True):
    """A partition that is closed until it is recovered: why, and which transactions are known to be committed there, up to `floor`."""

    topic: str
    partition: int
    why: str
    floor: int
    transactions: tuple[int, ...] = ()


Closed = dict[tuple[str, int], Unrecovered]
"""The partitions that are closed, each by its topic and number, or `ALL`."""


def read_unrecovered(disk: Disk, folder: str) -> Closed:
    """The partitions that are closed, each with its reason."""
    try:
        entries = msgspec.convert(read_text(disk, f"{folder}/unrecovered", "unrecovered"), type=list[Unrecovered])
    except FileNotFoundError:
        return {}
    return {(entry.topic, entry.partition): entry for entry in entries}


def recover_closed(disk: Disk, folder: str) -> Closed:
    """Recovers the partitions that are closed, as far as that is possible now; the caller holds the lock of the catalog.

    Returns those that stay closed.
    """
    before = read_unrecovered(disk, folder)
    closed: Closed = {}
    ends: dict[str, int] = {}
    for name in sorted({entry.topic for entry in before.values()}):
        entries = {number: entry for (topic, number), entry in before.items() if topic == name}
        try:
            numbers = _numbers(disk, f"{folder}/topics/{name}")
        except FileNotFoundError:
            continue  # the topic was deleted
        except StorageError as error:
            closed.update(_still_closed(entries.values(), error))
            continue
        for number in numbers if ALL in entries else sorted(entries.keys() & set(numbers)):
            entry = entries.get(number) or msgspec.structs.replace(entries[ALL], partition=number)
            known = set(entry.transactions)
            try:
                mark = _recovered(
                    disk,
                    f"{folder}/topics/{name}/{number}",
                    decided=known.__contains__,
                    decided_or_old=lambda each: each in known or each <= entry.floor,  # noqa: B023
                )
            except StorageError as error:
                closed.update(_still_closed([entry], error))
                continue
            if mark is not None:
                ends[f"{name}/{number}"] = mark.end
    if ends:
        incarnations = read_incarnations(disk, folder)
        incarnations[-1]["ends"].update(ends)
        write_text(disk, f"{folder}/incarnations", "incarnations", incarnations)
    if closed.keys() != before.keys():
        _write_unrecovered(disk, folder, closed)
    return closed


def check_recovered(closed: Mapping[tuple[str, int], Unrecovered]) -> None:
    """For the doctor: `Damaged` where a partition is closed."""
    for entry in closed.values():
        of = f"topic {entry.topic!r}"
        first = f"all of {of}" if entry.partition == ALL else f"partition {entry.partition} of {of}"
        raise Damaged(
            f"{len(closed)} partitions or topics could not be recovered after the machine stopped, and are closed; the first is "
            f"{first}: {entry.why}",
            advice="Fix the cause, then run `headwater doctor --repair`. Nothing acknowledged is lost.",
        )


def _still_closed(entries: Iterable[Unrecovered], error: StorageError) -> Closed:
    return {(each.topic, each.partition): msgspec.structs.replace(each, why=error.what) for each in entries}


def _write_unrecovered(disk: Disk, folder: str, closed: Closed) -> None:
    path = f"{folder}/unrecovered"
    if closed:
        write_text(disk, path, "unrecovered", [msgspec.to_builtins(entry) for entry in closed.values()])
    elif disk.exists(path):
        disk.remove(path)
        disk.sync_folder(folder)


def recover_partition(disk: Disk, folder: str, *, decided: Decided, decided_or_old: Decided) -> Mark:
    """Brings one partition's head and active segment in line with what is on disk; returns its end."""
    locks = [disk.open(f"{folder}/{name}", "create") for name in ("lock", "sync")]
    try:
        for lock in locks:
            lock.lock()
        return _recover_locked(disk, folder, decided, decided_or_old)
    finally:
        for lock in locks:
            lock.close()


def _recover_locked(disk: Disk, folder: str, decided: Decided, decided_or_old: Decided) -> Mark:
    mark = _durable_mark(disk, folder)
    bases = segment_bases(disk, folder)
    if mark is not None and mark.base not in bases and any(base > mark.base for base in bases):
        # Its segment was sealed since: everything up to the next one was closed, and is on disk.
        mark = _start_of(disk, folder, min(base for base in bases if base > mark.base))
    start = mark or _first_mark(disk, folder, bases)
    try:
        end = _last_whole_frame(disk, folder, start, decided if mark else decided_or_old)
        _check_not_shorter(disk, folder, end)
    except (Damaged, FileNotFoundError) as error:
        _set_head(disk, folder, start)  # so nobody writes where something is missing
        if isinstance(error, Damaged):
            raise
        raise lost(f"{folder}/{segment_name(start.base)}", "it is missing") from None
    while end.end in bases and end.end > end.base:
        following = _next_mark(disk, folder, end)
        if following is None:
            break
        end = _last_whole_frame(disk, folder, following, decided if mark else decided_or_old)
    remove_begun(disk, folder, end.base)
    _cut(disk, folder, end)
    disk.sync_folder(folder)
    _set_head(disk, folder, end)
    return end


def segment_bases(disk: Disk, folder: str) -> list[int]:
    """The base offsets of the segments of frames in a folder, in order."""
    return sorted(bases_of(disk, folder, ".frames"))


def _recover_partitions(
    disk: Disk, folder: str, *, floor: int, found: Mapping[int, Decision], counters: Counter[str]
) -> tuple[dict[str, int], Closed]:
    """Every partition, found by its folder: a damaged topic file must not keep its neighbours from recovery."""
    ends: dict[str, int] = {}
    closed: Closed = {}
    known = read_unrecovered(disk, folder)
    for name in sorted(disk.names(f"{folder}/topics")):
        whole = known.get((name, ALL), Unrecovered(name, ALL, "", floor))
        try:
            numbers = _numbers(disk, f"{folder}/topics/{name}")
        except StorageError as error:
            if _is_of_machine(error):
                raise
            alone = [each for each in known.values() if each.topic == name and each.partition != ALL]
            closed.update(_still_closed([_told(each, found) for each in (whole, *alone)], error))
            counters["damaged_partitions"] += 1
            continue
        for number in numbers:
            before = known.get((name, number), msgspec.structs.replace(whole, partition=number))
            kept = set(before.transactions)
            try:
                mark = _recovered(
                    disk,
                    f"{folder}/topics/{name}/{number}",
                    decided=lambda each: each in found or each in kept,  # noqa: B023
                    decided_or_old=lambda each: each in found or each in kept or each <= before.floor,  # noqa: B023
                )
            except StorageError as error:
                if _is_of_machine(error):
                    raise
                closed.update(_still_closed([_told(before, found)], error))
                mark = None
            if mark is None:
                counters["damaged_partitions"] += 1
                continue
            ends[f"{name}/{number}"] = mark.end
            disk.reach("recovery: partition done")
    return ends, closed


def _told(entry: Unrecovered, found: Mapping[int, Decision]) -> Unrecovered:
    """With the transactions that the records tell of now: they go with the recovery."""
    kept = {number for number, decision in found.items() if _has_part(decision, entry.topic, entry.partition)}
    return msgspec.structs.replace(entry, transactions=tuple(sorted(kept.union(entry.transactions))))


def _numbers(disk: Disk, folder: str) -> list[int]:
    """The partitions of a topic by its folder; none of one whose deletion was begun, which goes, nor of what is no topic."""
    try:
        numbers = sorted(int(name) for name in disk.names(folder) if name.isdigit())
    except StorageError as error:
        if _errno(error) == errno.ENOTDIR or folder.rpartition("/")[2].startswith("."):
            return []
        raise
    if folder.rpartition("/")[2].startswith(".") or any(_is_deleted(disk, f"{folder}/{each}") for each in numbers):
        with suppress(StorageError):
            disk.remove_folder(folder)
        return []
    with suppress(StorageError, FileNotFoundError):
        partitions = topic_from_json(read_text(disk, f"{folder}/topic", "topic")).partitions
        return [number for number in range(partitions) if number in numbers]
    return numbers


def _is_deleted(disk: Disk, folder: str) -> bool:
    try:
        return is_marked_deleted(disk, folder)
    except StorageError as error:
        if _is_of_machine(error):
            raise
        return False  # it cannot be recovered either, and is named there


def _has_part(decision: Decision, topic: str, partition: int) -> bool:
    return any(part.topic == topic and partition in (part.partition, ALL) for part in decision.parts)


def _recovered(disk: Disk, folder: str, *, decided: Decided, decided_or_old: Decided) -> Mark | None:
    """The end of a partition; None where something of it is gone."""
    try:
        return recover_partition(disk, folder, decided=decided, decided_or_old=decided_or_old)
    except (Damaged, FileNotFoundError):
        return None


def _is_of_machine(error: StorageError) -> bool:
    """Whether all partitions would fail in the same way, or this Headwater is too old for the log."""
    return isinstance(error, (DiskFull, FormatTooNew)) or _errno(error) in _LACKING


def _errno(error: StorageError) -> int | None:
    """The operating system's number of what it refused; None where we did so ourselves."""
    cause = error.__cause__
    return cause.errno if isinstance(cause, OSError) else None


def _durable_mark(disk: Disk, folder: str) -> Mark | None:
    """The durable mark, or None where the head cannot be believed."""
    try:
        head = Head(disk, f"{folder}/head", writable=False)
    except (Damaged, FileNotFoundError):
        return None
    try:
        return head.durable_after_power_loss()
    finally:
        head.close()


def _first_mark(disk: Disk, folder: str, bases: list[int]) -> Mark:
    """Where to start without a head: the newest segment whose header is whole."""
    for base in reversed(bases):
        try:
            return _start_of(disk, folder, base)
        except Damaged:
            continue
    raise Damaged(
        f"{folder} has neither a head nor an active segment that can be read.",
        advice="Run `headwater doctor`; restore the partition from a mirror or a backup.",
    )


def _next_mark(disk: Disk, folder: str, end: Mark) -> Mark | None:
    """The start of the segment that goes on at `end`, or None where the one that stands there does not."""
    try:
        start = _start_of(disk, folder, end.end)
    except Damaged:
        return None
    return start if start.chain == end.chain else None


def _start_of(disk: Disk, folder: str, base: int) -> Mark:
    segment = Segment(disk, folder, base)
    header = segment.header
    segment.close()
    return Mark(header.base, header.base, segment.start, header.running, header.appended, header.chain)


def _set_head(disk: Disk, folder: str, mark: Mark) -> None:
    """In place where possible, since readers without the right to write may have it mapped already."""
    try:
        head = Head(disk, f"{folder}/head")
    except (Damaged, FileNotFoundError):
        create_head(disk, f"{folder}/head", mark, first=_lowest_base(disk, folder))
        disk.sync_folder(folder)
        return
    try:
        lowest = _lowest_base(disk, folder)
        head.set_after_power_loss(mark, firsts=head.firsts_after_power_loss() or (lowest, lowest))
        head.sync()
    finally:
        head.close()


def _lowest_base(disk: Disk, folder: str) -> int:
    """Where the first segment begins, of either kind: the first offset, where the head cannot say it."""
    return min([*bases_of(disk, folder, ".frames"), *bases_of(disk, folder, ".arrow")], default=0)


def _last_whole_frame(disk: Disk, folder: str, start: Mark, decided: Decided) -> Mark:
    """The mark behind the last frame that counts, going on from one that is certain."""
    segment = Segment(disk, folder, start.base)
    try:
        seen = end = start
        while (frame := segment.frame_at(seen.position)) is not None:
            if not _follows(frame, seen) or not segment.is_intact(frame, seen.position):
                break
            if frame.transaction and not decided(frame.transaction):
                break
            seen = seen.behind(frame)
            if not frame.flags & CONTINUES:
                end = seen
        return end
    finally:
        segment.close()


def _follows(frame: Frame, end: Mark) -> bool:
    return frame.base_offset == end.end and frame.chain == end.chain


def _check_not_shorter(disk: Disk, folder: str, end: Mark) -> None:
    path = f"{folder}/{segment_name(end.base)}"
    file = disk.open(path)
    try:
        if file.size() < end.position:
            raise lost(path, f"it has {file.size()} bytes, and its events took {end.position}")
    finally:
        file.close()


def _cut(disk: Disk, folder: str, end: Mark) -> None:
    """Removes what does not count, and syncs what does: some of it may have been whole only in the page cache."""
    file = disk.open(f"{folder}/{segment_name(end.base)}", "write")
    try:
        file.truncate(end.position)
        file.sync()
    finally:
        file.close()
