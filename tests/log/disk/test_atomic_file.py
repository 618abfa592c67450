"""Files that are replaced as a whole: killed or without power between any two steps, the old one is there or the new one."""

from __future__ import annotations

from itertools import count

import pytest

import headwater as hw
from headwater.log.disk.atomic_file import replace_file
from headwater.log.doctor.doctor import examine
from headwater.log.file import commit
from headwater.model.errors import LogNotFound, TopicNotFound
from headwater.testing import Crashed, SimDisk
from headwater.testing.contracts.case import values_of
from headwater.testing.crash.points import replacing_points

FOLDER = "/disk/log"


class Story:
    """What a process does that replaces files of every kind, and how far it was told that it had come."""

    def __init__(self) -> None:
        self.lateness_s = self.events = 0
        self.has_topic = self.is_over = False

    def tell(self, log: hw.Log) -> None:
        """All of it."""
        log.create_topic("t", partitions=1)
        self.has_topic = True
        for seconds in (1, 2):
            log.alter_topic("t", lateness=f"{seconds} seconds")
            self.lateness_s = seconds
            with log.producer(id=f"p{seconds}") as producer:
                producer.send("t", b"x", sequence=1)
            self.events += 1
            log.stage(f"s{seconds}")
            with log.consumer("t", group=f"g{seconds}", commit="manual") as consumer:
                consumer.poll(timeout_s=0)
                with log.transaction() as transaction:
                    transaction.append("t", [b"y"])
                    transaction.commit_offsets(consumer)
                self.events += 1
        self.is_over = True


@pytest.mark.parametrize("power", ["kept", "lost"])
@pytest.mark.parametrize("point", replacing_points())
def test_a_crash_while_a_file_is_replaced_leaves_the_old_or_the_new_one(
    point: str, power: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a log, a topic, a producer, a group, a stage, and of the record of transactions; and the next process does it all."""
    monkeypatch.setattr(commit, "COMMITS_BYTES_MAX", 300)
    for nth in count(1):
        disk, story = SimDisk(nth), Story()
        disk.crash_at("one", point, nth)
        try:
            with hw.open_log(FOLDER, disk=disk.process("one")) as log:
                story.tell(log)
        except Crashed:
            disk.kill("one")
        if power == "lost":
            disk.power_loss()
        check(disk, story)
        if story.is_over:
            assert nth > 8
            return


def check(disk: SimDisk, story: Story) -> None:
    """Everything that was acknowledged is there, and the log is healthy and goes on."""
    try:
        log = hw.open_log(FOLDER, disk=disk.process("two"), create=False)
    except LogNotFound:
        assert not story.has_topic
        log = hw.open_log(FOLDER, disk=disk.process("two"))
    with log:
        try:
            assert log.topic("t").lateness_us in (story.lateness_s * 1_000_000, (story.lateness_s + 1) * 1_000_000)
            assert len(values_of(log, "t")) in (story.events, story.events + 1)
            log.delete_topic("t")
        except TopicNotFound:
            assert not story.has_topic
        Story().tell(log)
    assert examine(FOLDER, disk=disk.process("doctor")).healthy


def test_what_one_left_who_died_is_written_over() -> None:
    """Also where it was longer."""
    disk = SimDisk(0)
    process = disk.process("one")
    process.make_folder("/disk")
    left = process.open("/disk/file.new", "create")
    left.write_at(0, [b"much longer than what comes"])
    left.close()
    replace_file(process, "/disk/file", [b"new", b"er"])
    file = process.open("/disk/file")
    assert file.read_at(0, file.size()) == b"newer"
    assert not process.exists("/disk/file.new")
