"""The groups of a local log, in files.

    groups/<group>/lock             the group's lock
    groups/<group>/generation       slot file (magic "HWGENR"): the generation of the roster
    groups/<group>/deleted          there if the group was removed
    groups/<group>/roster           the roster (a readable file, see `headwater.log.disk.text`, but not synced)
    groups/<group>/members/<name>   magic "HWMEMB", format u16, then a u64: when the member polled last. Locked by it while it lives
    groups/<group>/offsets/<topic>/<n>   slot file (magic "HWOFFS") with the facts `committed` and `owner` of one partition

Invariants:
- everything but the members' polls is changed under the group's lock, or by whoever settles a transaction of a dead holder of
  that lock (whoever takes the lock settles first, so the two never meet);
- a member's file is made and locked under the group's lock: one that is not locked belongs to a dead process;
- the generation rises before its roster is written. A crash in between leaves the number for the next roster, and makes
  everybody look;
- rosters, polls and plain commits are not synced: they outlive every process, and after a power loss every member is dead and a
  commit that was lost redelivers. The offsets of a transaction are in its record until the slot files are synced;
- the files of a removed group stay: other processes may have them open, and two groups of one name with different locks would both
  believe in themselves. `deleted` is the decision; the offsets are wiped after it, or, where the remover was killed, by the first
  member that enters, which takes the file away when the wiped offsets are on disk.

Thread-safety: may be used by many threads; each group has one lock file in a process, and a mutex before it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress

import msgspec
from crc32c import crc32c

from headwater.log.disk.atomic_file import replace_file
from headwater.log.disk.disk import Disk, File
from headwater.log.disk.gate import Gate, settled
from headwater.log.disk.slots import SlotFile, begin_anew, create_slot_file
from headwater.log.disk.text import read_text
from headwater.log.file.commit import Decision
from headwater.log.port.assignment import Place
from headwater.log.port.group import (
    NO_OFFSET,
    Committed,
    OffsetPart,
    Owner,
    Presence,
    Roster,
    SharedGroup,
    forget_offsets,
    not_owner,
)
from headwater.model.errors import Damaged, GroupNotFound, NoAccess

FORMAT = 1

GENERATION_MAGIC = b"HWGENR"
GENERATION = struct.Struct("<Q")
_DELETED = "deleted"
_OFFSETS_MAGIC = b"HWOFFS"
_COMMITTED_SHAPE = struct.Struct("<qqqqq32s")
_OWNER_SHAPE = struct.Struct("<32sQ")
_SHAPES = (_COMMITTED_SHAPE, _OWNER_SHAPE)
COMMITTED, OWNER = range(2)
_MEMBER = struct.Struct("<6sHQ")
_MEMBER_MAGIC = b"HWMEMB"
_POLLED = struct.Struct("<Q")


class GroupFiles:
    """The groups of one log, as far as one process has used them."""

    def __init__(self, disk: Disk, folder: str, *, gate: Gate, settle: Callable[[], None], writable: bool) -> None:
        self._disk = disk
        self._folder = f"{folder}/groups"
        self._gate = gate
        self._settle = settle
        self._writable = writable
        self._mutex = threading.Lock()
        self._groups: dict[str, FileGroup] = {}

    def names(self) -> list[str]:
        """The names of all groups, sorted."""
        names = group_names(self._disk, self._folder)
        return [name for name in names if not _is_removed(self._disk, f"{self._folder}/{name}")]

    def group(self, name: str, *, create: bool) -> FileGroup:
        """One group; `GroupNotFound`, unless it is to be made."""
        with self._mutex:
            found = self._groups.get(name)
            if found is None:
                folder = f"{self._folder}/{name}"
                if not self._disk.exists(f"{folder}/generation"):
                    if not (create and self._writable):
                        raise self._not_found(name)
                    _create_group(self._disk, self._folder, name)
                found = FileGroup(
                    self._disk, folder, name, gate=self._gate, settle=self._settle, writable=self._writable
                )
                self._groups[name] = found
            if not create and _is_removed(self._disk, f"{self._folder}/{name}"):
                raise self._not_found(name)
            return found

    def _not_found(self, name: str) -> GroupNotFound:
        known = ", ".join(self.names()[:10]) or "none yet"
        return GroupNotFound(f"Group {name!r} does not exist in this log.", advice=f"Groups here: {known}.")

    def check(self, offsets: Iterable[OffsetPart]) -> None:
        """Refuses a transaction whose offsets are not its member's to commit; the caller holds the groups' locks."""
        for part in offsets:
            place = (part.topic, part.partition)
            if self.group(part.group, create=False).owner(place) != Owner(part.member, part.generation):
                raise not_owner(part.group, place)

    def publish(self, decision: Decision, *, now_us: int) -> None:
        """Applies the offsets of a decided transaction where that was not done yet.

        A group that was removed or damaged since must not keep everybody else from settling the transaction.
        """
        for part in decision.offsets:
            with suppress(GroupNotFound, Damaged):
                group, place = self.group(part.group, create=False), (part.topic, part.partition)
                before = group.committed(place)
                if before.transaction < decision.transaction:
                    group.set_committed(place, _committed_by(decision.transaction, part, before, now_us))
                    self._disk.reach("group: offset published")

    def sync(self, decisions: Iterable[Decision]) -> None:
        """Returns when the offsets that these transactions have committed are on disk; what is gone or damaged keeps nobody else back."""
        places = {(part.group, part.topic, part.partition) for each in decisions for part in each.offsets}
        for name, topic, number in sorted(places):
            with suppress(FileNotFoundError, Damaged):
                slot = open_slot(self._disk, slot_path(f"{self._folder}/{name}", (topic, number)), writable=True)
                try:
                    slot.sync()
                finally:
                    slot.close()
        self._disk.reach("group: offsets synced")

    def close(self) -> None:
        """Frees everything."""
        for group in self._groups.values():
            group.close()


class FileGroup(SharedGroup):
    """One group, opened by one process."""

    def __init__(
        self, disk: Disk, folder: str, name: str, *, gate: Gate, settle: Callable[[], None], writable: bool
    ) -> None:
        self.name = name
        self._disk = disk
        self._folder = folder
        self._gate = gate
        self._settle = settle
        self._writable = writable
        # Re-entrant: an interrupt may leave a holder behind in its own traceback, and whoever cleans up after it is that thread.
        self._mutex = threading.RLock()
        self._lock = disk.open(f"{folder}/lock", "write" if writable else "read")
        self._generation = SlotFile(
            disk,
            f"{folder}/generation",
            magic=GENERATION_MAGIC,
            format_max=FORMAT,
            shapes=(GENERATION,),
            writable=writable,
        )
        self._slots: dict[Place, SlotFile] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._gate:
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._gate:
            if not self._writable:
                raise NoAccess(
                    f"Group {self.name!r} cannot be changed: its log was opened read-only.",
                    advice="Open the log without read_only=True, as a user who may write to its folder.",
                )
            with self.held():
                yield

    def held(self) -> AbstractContextManager[None]:
        """`locked`, for one who has passed the log's gate already."""
        return settled(self._mutex, self._lock, self._settle)

    # The roster

    def generation(self) -> int:
        return int(self._generation.read(0)[0])

    def roster(self) -> Roster:
        try:
            return msgspec.convert(read_text(self._disk, f"{self._folder}/roster", "roster"), type=Roster)
        except FileNotFoundError:
            return Roster(self.generation())
        except (Damaged, msgspec.ValidationError):
            raise Damaged(
                f"{self._folder}/roster is damaged.",
                advice="Close every consumer of the group and run `headwater doctor --repair`: no offset is lost.",
            ) from None

    def write_roster(self, roster: Roster) -> None:
        self._generation.write(0, roster.generation)
        self._disk.reach("group: generation raised")
        body = msgspec.json.encode(roster)
        first = f"headwater roster {FORMAT} {crc32c(body):08x}\n".encode("ascii")
        path = f"{self._folder}/roster"
        replace_file(self._disk, path, [first + body], point="group: roster", sync=False, sync_folder=False)

    # Members

    def mark_deleted(self) -> None:
        """It is removed; the caller holds the lock."""
        _mark_removed(self._disk, self._folder)

    def enter(self, member: str, now_us: int) -> Presence:
        self._sweep()
        if _is_removed(self._disk, self._folder):
            self.mend(self.places())
            forget_offsets(self)
            self.sync()
            _unmark_removed(self._disk, self._folder)
        file = self._disk.open(f"{self._folder}/members/{member}", "create")
        file.lock()
        file.write_at(0, [_MEMBER.pack(_MEMBER_MAGIC, FORMAT, now_us)])
        self._disk.reach("group: entered")
        return _FilePresence(file)

    def _sweep(self) -> None:
        """Removes what members left that died before they stood in a roster, or after."""
        names = set(self._disk.names(f"{self._folder}/members"))
        for name in names - self.last_polls(names).keys():
            self.forget(name)

    def forget(self, member: str) -> None:
        self._disk.remove(f"{self._folder}/members/{member}")

    def last_polls(self, members: Iterable[str]) -> dict[str, int]:
        polls = {}
        for member in members:
            try:
                file = self._disk.open(f"{self._folder}/members/{member}")
            except FileNotFoundError:
                continue
            try:
                raw = file.read_at(0, _MEMBER.size)
                if len(raw) == _MEMBER.size and not file.lock(wait=False):
                    polls[member] = int(_MEMBER.unpack(raw)[2])
            finally:
                file.close()
        return polls

    # Partitions

    def places(self) -> list[Place]:
        return group_places(self._disk, self._folder)

    def owner(self, place: Place) -> Owner:
        slot = self._slot(place)
        if slot is None:
            return Owner()
        member, generation = slot.read(OWNER)
        return Owner(_text(member), generation)

    def set_owner(self, place: Place, owner: Owner) -> None:
        slot = self._slot(place) or self._made_slot(place)
        slot.write(OWNER, owner.member.encode("ascii"), owner.generation)
        self._disk.reach("group: owner set")

    def committed(self, place: Place) -> Committed:
        slot = self._slot(place)
        return Committed() if slot is None else _to_committed(slot.read(COMMITTED))

    def set_committed(self, place: Place, committed: Committed) -> None:
        slot = self._slot(place) or self._made_slot(place)
        slot.write(COMMITTED, *_from_committed(committed))
        self._disk.reach("group: offset committed")

    def sync(self) -> None:
        """Returns when every committed offset is on disk; a file that is damaged keeps nobody else from going on."""
        for place in self.places():
            with suppress(Damaged):
                slot = self._slot(place)
                if slot is not None:
                    slot.sync()

    def mend(self, places: Iterable[Place]) -> None:
        for place in places:
            try:
                self.owner(place)
                self.committed(place)
            except Damaged:
                lose_offset(self._disk, slot_path(self._folder, place), NO_OFFSET)

    def close(self) -> None:
        """Frees everything."""
        for slot in self._slots.values():
            slot.close()
        self._generation.close()
        self._lock.close()

    def _slot(self, place: Place) -> SlotFile | None:
        found = self._slots.get(place)
        if found is None:
            try:
                found = open_slot(self._disk, slot_path(self._folder, place), writable=self._writable)
            except FileNotFoundError:
                return None
            found = self._slots.setdefault(place, found)
        return found

    def _made_slot(self, place: Place) -> SlotFile:
        """A partition's file, on disk with its name before anything in it counts; the caller holds the lock."""
        path = slot_path(self._folder, place)
        folder, above = path.rpartition("/")[0], f"{self._folder}/offsets"
        self._disk.make_folder(folder)
        facts = ((_COMMITTED_SHAPE, _from_committed(Committed())), (_OWNER_SHAPE, (b"", 0)))
        create_slot_file(self._disk, path, magic=_OFFSETS_MAGIC, version=FORMAT, facts=facts)
        self._disk.reach("group: slot made")
        self._disk.sync_folder(folder)
        self._disk.sync_folder(above)
        slot = self._slot(place)
        assert slot is not None
        return slot


class _FilePresence:
    def __init__(self, file: File) -> None:
        self._file = file

    def beat(self, now_us: int) -> None:
        self._file.write_at(_MEMBER.size - _POLLED.size, [_POLLED.pack(now_us)])

    def drop(self) -> None:
        self._file.close()


def group_names(disk: Disk, folder: str) -> list[str]:
    """The groups in a folder, sorted."""
    try:
        names = disk.names(folder)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if disk.exists(f"{folder}/{name}/generation"))


def group_places(disk: Disk, folder: str) -> list[Place]:
    """The partitions that have a file in a group's folder."""
    offsets = f"{folder}/offsets"
    return sorted(
        (topic, int(number))
        for topic in disk.names(offsets)
        for number in disk.names(f"{offsets}/{topic}")
        if number.isdigit()
    )


def recover_groups(disk: Disk, folder: str, decided: Mapping[int, Decision]) -> None:
    """After an unclean stop: every member is dead, and what recorded transactions committed is put back where it was lost.

    A group of which a file is damaged or gone says so when it is used; the others go on.
    """
    for name in group_names(disk, f"{folder}/groups"):
        group = f"{folder}/groups/{name}"
        disk.remove(f"{group}/roster")
        disk.remove_folder(f"{group}/members")
        disk.make_folder(f"{group}/members")
        with suppress(Damaged):
            slot = SlotFile(
                disk,
                f"{group}/generation",
                magic=GENERATION_MAGIC,
                format_max=FORMAT,
                shapes=(GENERATION,),
                writable=True,
            )
            slot.write_after_power_loss(0, max((int(found) for (found,) in slot.read_all(0)), default=0) + 1)
            slot.close()
        offsets = {
            (part.topic, part.partition): (transaction, part)
            for transaction, decision in decided.items()
            for part in decision.offsets
            if part.group == name
        }
        with suppress(FileNotFoundError):
            for place in group_places(disk, group):
                with suppress(Damaged):
                    recover_slot(disk, slot_path(group, place), offsets.get(place))
                disk.reach("group: recovered one")


def lose_offset(disk: Disk, path: str, offset: int) -> None:
    """A partition's file that is damaged is begun anew, at an offset or at none."""
    facts = ((_COMMITTED_SHAPE, _from_committed(Committed(offset))), (_OWNER_SHAPE, (b"", 0)))
    begin_anew(disk, path, magic=_OFFSETS_MAGIC, version=FORMAT, facts=facts)


def recover_slot(disk: Disk, path: str, recorded: tuple[int, OffsetPart] | None) -> None:
    """The newest version of a partition's offset that is whole, or what a transaction recorded; nobody owns it."""
    slot = open_slot(disk, path, writable=True)
    try:
        whole = [_to_committed(values) for values in slot.read_all(COMMITTED)]
        last = max(whole, key=lambda committed: committed.sequence, default=Committed())
        if recorded is not None and last.transaction < recorded[0]:
            last = _committed_by(*recorded, last, last.at_us)
        slot.write_after_power_loss(COMMITTED, *_from_committed(last))
        slot.write_after_power_loss(OWNER, b"", 0)
        slot.sync()
    finally:
        slot.close()


def _create_group(disk: Disk, folder: str, name: str) -> None:
    """The files of a group without members; whoever is first makes them."""
    group = f"{folder}/{name}"
    for part in ("members", "offsets"):
        disk.make_folder(f"{group}/{part}")
    lock = disk.open(f"{group}/lock", "create")
    try:
        lock.lock()
        if not disk.exists(f"{group}/generation"):
            create_slot_file(
                disk, f"{group}/generation", magic=GENERATION_MAGIC, version=FORMAT, facts=((GENERATION, (0,)),)
            )
            disk.reach("group: made")
            for made in (group, folder, folder.rpartition("/")[0]):
                disk.sync_folder(made)
    finally:
        lock.close()


def slot_path(folder: str, place: Place) -> str:
    """The file of a partition in a group's folder."""
    return f"{folder}/offsets/{place[0]}/{place[1]}"


def open_slot(disk: Disk, path: str, *, writable: bool) -> SlotFile:
    """The facts of a partition; `Damaged`, `FileNotFoundError`."""
    return SlotFile(disk, path, magic=_OFFSETS_MAGIC, format_max=FORMAT, shapes=_SHAPES, writable=writable)


def _committed_by(transaction: int, part: OffsetPart, before: Committed, now_us: int) -> Committed:
    return Committed(part.offset, part.incarnation, transaction, before.sequence + 1, now_us, part.topic_id)


def _to_committed(values: tuple[int, int, int, int, int, bytes]) -> Committed:
    return Committed(*values[:5], topic_id=_text(values[5]))


def _from_committed(committed: Committed) -> tuple[int, int, int, int, int, bytes]:
    *numbers, topic_id = msgspec.structs.astuple(committed)
    return (*numbers, topic_id.encode("ascii"))


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii")


def _is_removed(disk: Disk, folder: str) -> bool:
    """Whether the group in a folder was removed."""
    return disk.exists(f"{folder}/{_DELETED}")


def _mark_removed(disk: Disk, folder: str) -> None:
    """Decides that the group in a folder is removed; the caller holds its lock."""
    disk.open(f"{folder}/{_DELETED}", "create").close()
    disk.sync_folder(folder)
    disk.reach("removal: group marked")


def _unmark_removed(disk: Disk, folder: str) -> None:
    """It begins anew; the caller holds its lock, and its offsets are wiped and on disk."""
    disk.reach("removal: group begins anew")
    disk.remove(f"{folder}/{_DELETED}")
    disk.sync_folder(folder)
