"""Numbers that tasks tell the driver in files: late rows and maxima, on a disk that loses power, runs full, and under kills."""

from __future__ import annotations

from functools import partial

import pytest

from headwater.log.disk.disk import Disk
from headwater.model.clock import NO_TIME
from headwater.processing.time.late_rows import LateRows
from headwater.processing.time.maxima import Maxima
from headwater.testing import SimDisk
from tests.rigs.processing.misfortunes import Machine

FOLDER = "/disk/state/maxima/0"
AT = ("clicks", 0)
ENDS = (5, 9, 14, 20)


def maximum(offset: int) -> int:
    """The greatest event time before an offset, as reading the events would find it."""
    return offset * 1_000 - 4_000


def read_again(again: list[int], at: tuple[str, int], start: int, end: int, time: int) -> int:
    """What reads the events again; notes that it was called."""
    again.append(end)
    return max(time, maximum(end))


def tell_maximum(disk: Disk, *, offset: int) -> None:
    Maxima(FOLDER, disk=disk).tell(AT, offset, maximum(offset))


def tell_beat(disk: Disk, *, offset: int) -> None:
    Maxima(FOLDER, disk=disk).tell(AT, offset, maximum(offset) + 500, is_heartbeat=True)


@pytest.mark.parametrize("seed", range(150))
def test_a_maximum_is_what_was_told_or_is_read_again(seed: int) -> None:
    """Whatever a power loss leaves of the file: a wrong watermark would make events late that are not, or wait for ever."""
    machine, before = Machine(seed), (0, NO_TIME)
    for offset in ENDS:
        machine.run(partial(tell_maximum, offset=offset))
        tells_beat = machine.chance.random() < 0.5
        has_beat = tells_beat and machine.run(partial(tell_beat, offset=offset)) and not machine.lost_power
        again: list[int] = []
        read = partial(read_again, again)
        found = Maxima(FOLDER, disk=machine.disk.process("driver")).reached({AT: offset}, {AT: before}, read)
        known = {maximum(offset) + 500} if has_beat else {maximum(offset), maximum(offset) + 500}
        assert found[AT][0] == offset and found[AT][1] in (known if tells_beat else {maximum(offset)})
        if not (machine.lost_power or machine.was_killed or machine.ran_full):
            assert not again
        before = offset, maximum(offset)


def test_a_heartbeat_at_the_beginning_of_1970_counts() -> None:
    """Its time is 0, which is a time as any other."""
    maxima = Maxima(FOLDER, disk=SimDisk(1).process("one"))
    maxima.tell(AT, 3, 0, is_heartbeat=True)
    assert maxima.reached({AT: 3}, {AT: (3, NO_TIME)}, lambda *_: NO_TIME) == {AT: (3, 0)}


def test_of_maxima_only_those_of_the_newest_batch_stay() -> None:
    """Drafts of tasks that died are removed with them."""
    disk = SimDisk(1)
    for offset in ENDS:
        tell_maximum(disk.process("one"), offset=offset)
    draft = disk.process("one").open(f"{FOLDER}/clicks/0/5.77.new", "create")
    draft.close()
    Maxima(FOLDER, disk=disk.process("one")).reached({AT: 14}, {}, lambda *_: NO_TIME)
    assert sorted(disk.process("one").names(f"{FOLDER}/clicks/0")) == ["14", "20"]


@pytest.mark.parametrize("seed", range(150))
def test_late_rows_are_counted_once(seed: int) -> None:
    """A task that died tells them again; a power loss may take the count, and never a batch. Nothing is left of what was counted."""
    machine = Machine(seed, loses_power=seed % 2 == 0)
    told = 0
    for start, end in zip((0, *ENDS), ENDS, strict=False):
        tell = partial(_tell_late, start=start, end=end, count=end)
        while not machine.run(tell):
            pass
        told += end
    driver = machine.disk.process("driver")
    rows = LateRows("/disk/late", disk=driver)
    counted = rows.take({AT: (0, 14)})
    assert counted <= 5 + 9 + 14 and (machine.lost_power or counted == 5 + 9 + 14)
    assert rows.take({AT: (0, 14)}) == 0
    counted += rows.take({AT: (14, 20), ("views", 3): (0, 9)})
    assert counted <= told and (machine.lost_power or counted == told)
    assert machine.lost_power or driver.names("/disk/late/clicks/0") == []


def _tell_late(disk: Disk, *, start: int, end: int, count: int) -> None:
    LateRows("/disk/late", disk=disk).tell(AT, start, end, count)


def test_a_number_that_cannot_be_written_leaves_no_draft() -> None:
    """The draft would take up the room that is missing."""
    machine = Machine(1, loses_power=False)
    machine.disk.capacity_bytes = 0
    with pytest.raises(Exception, match="No room"):
        _tell_late(machine.disk.process("one"), start=0, end=5, count=2)
    assert machine.disk.process("one").names("/disk/late/clicks/0") == []
