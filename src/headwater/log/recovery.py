"""Recovery: what the first process to open a log does after the machine stopped uncleanly.

A killed process needs none of this: what it wrote is still in the page cache, and the heads say how much of it counts. A
power loss is another matter: unsynced writes may be gone, torn or reordered, and a head may be older or newer than the
frames beside it. `durable` alone can be believed. So, for each partition: go on from its durable mark as long as frames are
whole, chained, and (if they belong to a transaction) recorded as committed, over into the next segment where one goes on
with the same chain; that is the new end, and everything behind it goes. The first offset is the greatest that is whole; what
lies below it was given up, whether its files are gone or not.

All partitions are recovered before the log is opened, so that no reader sees half of a transaction. The incarnation rises,
and `incarnations` keeps the end of each partition at that moment: a position from before that lies behind it is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from headwater.log.catalog import read_text, write_text
from headwater.log.commit import CommitLog
from headwater.log.disk import Disk
from headwater.log.frame import CONTINUES, Frame
from headwater.log.group_files import recover_groups
from headwater.log.head import Head, Mark, create_head, is_marked_deleted
from headwater.log.segment import Segment, segment_name
from headwater.log.stage_files import recover_stages
from headwater.model.clock import Clock
from headwater.model.errors import Damaged

INCARNATIONS_MAX = 100

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
            ends = _recover_partitions(disk, folder, floor=floor, found=found, counters=counters)
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
    end = _last_whole_frame(disk, folder, start, decided if mark else decided_or_old)
    while end.end in bases and end.end > end.base:
        following = _next_mark(disk, folder, end)
        if following is None:
            break
        end = _last_whole_frame(disk, folder, following, decided if mark else decided_or_old)
    for base in bases:
        if base > end.base:
            disk.remove(f"{folder}/{segment_name(base)}")
    for name in disk.names(folder):
        if (
            name.endswith(".arrow") and int(name.removesuffix(".arrow")) >= end.base
        ):  # begun, and not published (see `gaps`)
            disk.remove(f"{folder}/{name}")
    _cut(disk, folder, end)
    disk.sync_folder(folder)
    _set_head(disk, folder, end)
    return end


def segment_bases(disk: Disk, folder: str) -> list[int]:
    """The base offsets of the segments of frames in a folder, in order."""
    return sorted(int(name.removesuffix(".frames")) for name in disk.names(folder) if name.endswith(".frames"))


def _recover_partitions(
    disk: Disk, folder: str, *, floor: int, found: Mapping[int, object], counters: Counter[str]
) -> dict[str, int]:
    """Every partition, found by its folder: a damaged topic file must not keep its neighbours from recovery."""
    ends = {}
    for name in sorted(disk.names(f"{folder}/topics")):
        if name.startswith("."):
            disk.remove_folder(f"{folder}/topics/{name}")
            continue
        numbers = sorted(filter(str.isdigit, disk.names(f"{folder}/topics/{name}")), key=int)
        if any(is_marked_deleted(disk, f"{folder}/topics/{name}/{number}") for number in numbers):
            disk.remove_folder(f"{folder}/topics/{name}")
            continue
        for number in numbers:
            try:
                mark = recover_partition(
                    disk,
                    f"{folder}/topics/{name}/{number}",
                    decided=found.__contains__,
                    decided_or_old=lambda transaction: transaction in found or transaction <= floor,
                )
            except Damaged:
                counters["damaged_partitions"] += 1
                continue
            ends[f"{name}/{number}"] = mark.end
            disk.reach("recovery: partition done")
    return ends


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
    return min(int(name.partition(".")[0]) for name in disk.names(folder) if name.endswith((".frames", ".arrow")))


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


def _cut(disk: Disk, folder: str, end: Mark) -> None:
    """Removes what does not count, and syncs what does: some of it may have been whole only in the page cache."""
    file = disk.open(f"{folder}/{segment_name(end.base)}", "write")
    try:
        file.truncate(end.position)
        file.sync()
    finally:
        file.close()
