"""Points: names for the moments between two steps, at which a test may stop a process.

    disk.reach("append: written")                      code of the log says how far it has come, to the disk it works on
    PROCESS.reach("views: changes appended")           code that has no disk says it to its process
    with watched(stop_there): ...                      a test hears of every point that this process reaches

Each point is declared here once, with what has happened when it is reached: `DISK_POINTS` are reached through a `Disk`, so a
simulated disk hears of them, `PROCESS_POINTS` through `PROCESS`. A name that is not declared is an error wherever a test gives
one (`check_point`); a test compares the declared names with those that the code reaches.

Invariant: nobody watches in production, and a point then costs one call of a method that does nothing (26 ns). `watch` replaces
that method, so that no call has to look whether somebody watches. Thread-safety: the watcher is called by the thread that
reaches the point; `watch` itself is for one thread, before the others start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from headwater.model.errors import InvalidInput

Watcher = Callable[[str], None]
"""Is given the name of each point that is reached. What it raises comes out of the code that reached the point."""

DISK_POINTS: dict[str, str] = {
    # Appends, syncs, segments
    "append: locked": "An append holds the partition's lock; nothing is written yet.",
    "append: written": "The frames are in the file; no reader sees them yet.",
    "append: published": "The head says where the written events end.",
    "sync: done": "The segment's file is on disk; the head does not say so yet.",
    "sync: published": "The head says which events are on disk.",
    "roll: synced": "The full segment is on disk, and the next one is not there yet.",
    "roll: begun": "The head says that the next segment is being made.",
    "roll: created": "The next segment's file is there.",
    "roll: written published": "The head says that events are written to the next segment.",
    "heal: cut": "After a failed sync, the segment was cut to what is on disk, and synced.",
    "heal: begun segments removed": "Segments that were begun after the failed sync are removed.",
    "gap: published": "Events behind a gap of offsets are in a sealed file, and the head says so.",
    "gap: head synced": "The head that knows of the gap is on disk.",
    "heartbeat: written": "A heartbeat is appended to its file, and synced.",
    "heartbeat: file written": "A shorter file of heartbeats is written beside the old one.",
    "heartbeat: file named": "The shorter file of heartbeats has the name of the old one.",
    # Topics and the log itself
    "open: state made": "A new log has its state and commit records; the file that says it is a log is missing.",
    "create: partition made": "One partition of a new topic is made, under a temporary name.",
    "create: written": "The new topic is complete under its temporary name.",
    "create: named": "The new topic has its name; the folder is not synced yet.",
    "delete: marked one": "One partition of a topic is marked as deleted.",
    "delete: renamed": "The deleted topic has no name any more; its files are still there.",
    "split: fenced": "All partitions of the topic are locked, and nothing is changed.",
    "split: partition made": "One new partition is made, under a temporary name.",
    "split: partition named": "One new partition has its name.",
    "split: counted one": "One partition's head says that a split has begun.",
    "split: written": "The topic's file says how many partitions there are now.",
    "split: counted one again": "One partition's head says that the split is done.",
    "replace: written": "A file that replaces another one as a whole is written beside it.",
    "replace: named": "The file has the name of the one that it replaces.",
    # Transactions, commit records, recovery
    "transaction: staged": "All events of a transaction are in their files; no reader sees them.",
    "transaction: synced": "All events of a transaction are on disk.",
    "commit: intended": "The commit state says that a record is being written.",
    "commit: written": "The commit record is written and not synced.",
    "commit: recorded": "The commit record is on disk: the transaction has happened.",
    "commit: published one": "One partition's head says where the transaction's events end.",
    "commit: done": "Everything of the transaction is published.",
    "settle: before publish": "Another process found a dead one's record, synced it, and is about to publish it.",
    "records: begun again": "The file of commit records was replaced by an empty one.",
    "recovery: partition done": "After a power loss, one partition is recovered.",
    "recovery: incarnation written": "All is recovered, and the new incarnation is written down.",
    "recovery: begun again": "The commit records are empty again; the boot id is not written yet.",
    # Stages
    "stage: marker made": "A new stage has its first marker and no fencing number.",
    "stage: made": "A new stage is complete; its folder is not synced.",
    "stage: marker written": "A stage's marker file is written beside the old one.",
    "stage: marker named": "The marker file has its name.",
    "stage: room made": "The marker file was made again with larger slots.",
    "stage: marker published": "A committed batch's marker is in its file.",
    "stage: markers synced": "The markers that a commit record speaks of are on disk.",
    "stage: number raised": "A new fencing number is written and not synced.",
    "stage: number synced": "The new fencing number is on disk: earlier holders are refused.",
    "stage: recovered one": "After a power loss, one stage is recovered.",
    # Groups
    "group: made": "A new group has its generation; its folder is not synced.",
    "group: entered": "A member has its file, and is not in the roster yet.",
    "group: generation raised": "The group's generation is raised; the roster is still the old one.",
    "group: roster written": "The new roster is written beside the old one.",
    "group: roster named": "The new roster has its name.",
    "group: slot made": "The file of a partition's offset is made; its folder is not synced.",
    "group: owner set": "A partition has a new owner.",
    "group: offset committed": "A committed offset is written.",
    "group: offset published": "An offset that a transaction committed is written.",
    "group: offsets synced": "The offsets that a commit record speaks of are on disk.",
    "group: recovered one": "After a power loss, one offset of a group is recovered.",
    "removal: group marked": "A group is marked as removed, on disk.",
    "removal: group begins anew": "A removed group's offsets are forgotten, and the mark is still there.",
    "removal: queue unnamed": "A removed queue has no file any more; its windows are still there.",
    "removal: window removed": "One window of a removed queue is gone.",
    # Queues
    "queue: leased": "Fresh events are leased in the window.",
    "queue: leased again": "Events whose time has come again are leased in the window.",
    "queue: looked at": "Fresh events are in the window, and none of them is leased yet.",
    "queue: given back": "The leases of a dead member are given back; the member is not forgotten yet.",
    "queue: burying": "Events are marked as being written to the dead letters.",
    "queue: buried": "The dead letters are written, and the events are not settled yet.",
    "queue: unit begun": "A unit of work is about to be written to the log.",
    "queue: unit committed": "A unit of work is in the log, and the windows do not know it.",
    "queue: window written": "A window is written beside the old one.",
    "queue: window marked": "The old window says that it was replaced.",
    "queue: window named": "The new window has its name.",
    "queue recovery: settled again": "After a power loss, a block of events that were acknowledged is settled again.",
    "queue recovery: put in order": "After a power loss, one partition's window is whole again.",
    # What keeps a topic small
    "seal: written": "A sealed file is written beside its place.",
    "seal: named": "The sealed file has its name.",
    "seal: renamed": "The sealed file's name is on disk; the frames are still there.",
    "seal: removed": "The frames that were sealed are removed.",
    "retention: first published": "The head says which offset is the first that is left.",
    "retention: given up": "That is on disk, and the old segments are still there.",
    "retention: removed one": "One file of a segment that was given up is removed.",
    "archive: added one": "One segment is in the archive, and still in the log.",
    "compaction: begun": "A group of sealed segments is about to be compacted into one.",
    "compaction: replaced one": "The first segment of the group holds what is kept of all of them.",
    "compaction: removed one": "One segment that was merged into another is removed.",
    "overload: reserve taken": "A part of the reserve was given to the full disk.",
    # Copies
    "backup: begun": "The vault is checked, and leftovers of killed backups are removed.",
    "backup: snapshot taken": "It is decided what the backup holds.",
    "backup: piece written": "A piece of a file is written to the vault.",
    "backup: file written": "A file is written to the vault under a temporary name.",
    "backup: file named": "A file in the vault has its name.",
    "backup: segment copied": "A closed segment is in the vault.",
    "backup: last segment copied": "What was written of the open segment is in the vault.",
    "backup: others copied": "All small files are in the vault.",
    "backup: manifest written": "The manifest is in the vault: the backup counts.",
    "backup: one removed": "One file that no backup needs is removed from the vault.",
    "backup: old files removed": "Everything that no backup needs is removed.",
    "restore: segment copied": "One segment is back in the folder.",
    "restore: topic made": "One topic is back.",
    "restore: others made": "All small files are back.",
    "restore: state made": "The restored log has its state and commit records.",
    "restore: complete": "The restored log is complete under a temporary name.",
    "restore: named": "The restored log has its name.",
    # Applications: small files, and stages that begin again
    "late rows: written": "In a task: a count of late rows is written beside its place.",
    "late rows: named": "The count has its name.",
    "maximum: written": "In a task: the greatest event time of a range of events is written beside its place.",
    "maximum: named": "That time has its name.",
    "pace: written": "How far the next batch goes in one input is written beside its place.",
    "pace: named": "That position has its name.",
    "skips: written": "The list of skipped events is written beside the old one, and synced.",
    "skips: named": "The new list has its name.",
    "status: written": "The application's status is written beside the old one.",
    "status: named": "The new status has its name.",
    "restart: written": "Where a stage begins again is written beside its place, and synced.",
    "restart: named": "That file has its name; the old checkpoint is still there.",
    "restart: checkpoint removed": "The checkpoint is removed, on disk; the last marker is not forgotten yet.",
    # Spark: state of operators, and stages that the driver commits
    "state: drafted": "An operator's state is written under a temporary name, and synced.",
    "state: saved": "The state has its name, on disk.",
    "frame: task staged": "In a task: its rows are staged.",
    "frame: all staged": "In the driver: all tasks of the batch have staged their rows.",
    "frame: committed": "The batch and its marker are in the log.",
    "frame: swept": "The staged rows are removed.",
}
"""The points that code reaches through a `Disk`, simulated or real."""

PROCESS_POINTS: dict[str, str] = {
    # Captures
    "capture: prepared": "The database is ready to be captured.",
    "capture: topics made": "The topics of all captured tables are there.",
    "capture: changes read": "Changes were read from the database, or there were none.",
    "capture: chunk read": "A chunk of existing rows was read.",
    "capture: before append": "A batch of changes is about to be appended.",
    "capture: appended": "The batch is in the log; the database does not know it yet.",
    "capture: confirmed": "The database knows that the batch is in the log.",
    # Spark's data source as a sink
    "stream: task begun": "In a task: the log is open, and no row is staged.",
    "stream: task staged": "In a task: its rows are staged.",
    "stream: all staged": "In the driver: all tasks of the batch have staged their rows.",
    "stream: committing": "The driver holds the stage, and is about to commit.",
    "stream: committed": "The batch and its marker are in the log.",
    "stream: swept": "The staged rows are removed.",
    # Views
    "views: table made": "The store has a table for the view.",
    "views: topic made": "The topic of the view's changes is there.",
    "views: registered": "The catalogue knows this generation of the view.",
    "views: catching up": "The store is about to get what the topic of changes has and it lacks.",
    "views: changes known": "It is known what a batch changes.",
    "views: changes appended": "The changes are in the log; the store has not got them.",
    "views: changes applied": "The store has the batch.",
    "views: old generation fenced": "Nobody writes the old generation any more.",
    "views: difference known": "It is known how the new generation differs from the old one.",
    "views: swapped in the log": "The log says that the new generation is the view.",
    "views: swapped in the store": "The store shows the new generation.",
    # Sinks
    "transactions: planned": "A batch of whole transactions is planned, and nothing is read.",
    "transactions: read": "The batch's rows are read, and compaction has not overtaken them.",
    "sink: begun": "The target's transaction is open, and nothing is written.",
    "sink: piece applied": "One piece of a batch is written to the target.",
    "sink: dead letters told": "Rows that the target refused are in the log; the batch is not committed.",
    "sink: committed": "The target has the batch and its marker.",
    "files: begun": "A folder to stage a batch in may be made.",
    "files: staged": "All files of the batch are staged.",
    "files: moving": "What a killed attempt left is removed, and no file of this one is moved.",
    "files: moved one": "One file of the batch has its final name.",
    "files: ledger written": "The new ledger is written beside the old one.",
    "files: entered": "The ledger says that the batch was added.",
    "files: swept": "Leftovers are removed.",
    "opensearch: bulk sent": "One bulk request of a batch was answered.",
    "redis: chunk written": "One chunk of a batch is in Redis.",
    "search: entered": "The marker is in the index's writer, and nothing is committed.",
    "export: read": "Changes were read that are to be exported.",
    "export: before append": "The exported events are made, and not appended.",
    "export: appended": "The exported events are in the other log.",
}
"""The points that code without a disk reaches."""

POINTS: dict[str, str] = {**DISK_POINTS, **PROCESS_POINTS}
"""Every point of Headwater, with what has happened when it is reached."""


class Points:
    """What a process tells of how far it has come: a real disk is one, and `PROCESS` is for code that has no disk."""

    def reach(self, point: str) -> None:
        """Says that the process has come to a point. Nothing happens, unless this process is watched."""


PROCESS = Points()
"""Where code without a disk says which points it reaches."""

_unwatched = Points.reach


def watch(watcher: Watcher | None) -> None:
    """From now on this process tells `watcher` of every point that it reaches; with None it tells nobody any more.

    Simulated disks, and disks that were made to crash, tell their own test and not the watcher.
    """
    if watcher is None:
        Points.reach = _unwatched  # type: ignore[method-assign]
        return

    def reach(self: Points, point: str) -> None:
        watcher(check_point(point))

    Points.reach = reach  # type: ignore[method-assign]


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Lets `watcher` hear of every point that this process reaches while the context is open."""
    before = Points.reach
    watch(watcher)
    try:
        yield
    finally:
        Points.reach = before  # type: ignore[method-assign]


def points_of(*prefixes: str) -> list[str]:
    """The points whose names begin so, in the order in which they are declared: `points_of("views:", "files:")`."""
    return [point for point in POINTS if point.startswith(prefixes)]


def check_point(point: str, *, among: Collection[str] = POINTS) -> str:
    """The name, if it is a declared point; otherwise `InvalidInput` names the nearest one."""
    if point in among:
        return point
    if point in POINTS:
        raise InvalidInput(
            f"No disk reaches the point {point!r}: the process does.",
            advice="Stop the process there with headwater.testing.kill_at, or a watcher of its points.",
        )
    nearest = get_close_matches(point, among, n=1, cutoff=0.0)
    raise InvalidInput(
        f"The crash point {point!r} does not exist.",
        advice=f"The nearest is {nearest[0]!r}; headwater.testing.POINTS has all of them.",
    )
