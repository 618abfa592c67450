"""What was built in parts holds together: copies of topics that were kept small, groups and queues over removed events."""

from __future__ import annotations

from pathlib import Path

import pytest

import headwater as hw
from headwater.log.doctor.doctor import examine
from headwater.model.errors import EventsMissed


@pytest.fixture
def log(tmp_path: Path) -> hw.Log:
    log = hw.open_log(str(tmp_path / "log"))
    log.create_topic("prices", "id BIGINT, price BIGINT", key="id", partitions=1, segment_bytes=4096, compact=True)
    log.create_topic("ticks", "id BIGINT", partitions=1, segment_bytes=4096, retention_bytes=8192)
    for number in range(60):
        log.append("prices", [{"id": id, "price": number} for id in range(10)])
        log.append("ticks", [{"id": 10 * number + id} for id in range(10)])
    log.tidy("prices")
    log.tidy("ticks")
    assert log.offsets("ticks")[0].start > 0
    return log


def test_a_backup_of_what_was_kept_small_is_the_same(log: hw.Log, tmp_path: Path) -> None:
    """Gaps, first offsets and tables come back as they were, and the doctor finds nothing."""
    log.backup(str(tmp_path / "backup"))
    hw.restore_log(str(tmp_path / "backup"), str(tmp_path / "restored"))
    with hw.open_log(str(tmp_path / "restored")) as restored:
        for topic in ("prices", "ticks"):
            columns = ["_offset", *log.topic(topic).schema.names]
            assert restored.offsets(topic) == log.offsets(topic)
            assert restored.read(topic, columns=columns).equals(log.read(topic, columns=columns))
        assert restored.table("prices").sort_by("id").equals(log.table("prices").sort_by("id"))
        with restored.reader("ticks", start={0: 0}) as reader, pytest.raises(EventsMissed):
            reader.poll()
        restored.append("ticks", [{"id": 600}])
        assert restored.read("ticks").num_rows == log.read("ticks").num_rows + 1
    assert examine(str(tmp_path / "restored")).healthy


def test_a_mirror_of_what_was_kept_small_is_the_same(log: hw.Log, tmp_path: Path) -> None:
    """And so is a backup of that mirror: gaps and first offsets go through both."""
    log.mirror(tmp_path / "copy")
    with hw.open_log(tmp_path / "copy") as copy:
        copy.backup(tmp_path / "backup")
    hw.restore_log(tmp_path / "backup", tmp_path / "restored")
    for path in (tmp_path / "copy", tmp_path / "restored"):
        with hw.open_log(path) as other:
            for topic in ("prices", "ticks"):
                columns = ["_offset", *log.topic(topic).schema.names]
                assert other.offsets(topic) == log.offsets(topic)
                assert other.read(topic, columns=columns).equals(log.read(topic, columns=columns))
        assert examine(str(path)).healthy


def test_a_group_that_was_overtaken_is_told_or_goes_on(log: hw.Log) -> None:
    """The events between its commit and the first that is left are named, or counted."""
    with log.consumer("ticks", group="told", start="earliest") as consumer:
        first = consumer.poll()[0].offset
        assert first == log.offsets("ticks")[0].start
        consumer.commit()
    for number in range(60):
        log.append("ticks", [{"id": number} for _ in range(10)])
    log.tidy("ticks")
    with log.consumer("ticks", group="told") as consumer, pytest.raises(EventsMissed) as missed:
        consumer.poll()
    assert missed.value.last == log.offsets("ticks")[0].start - 1
    with log.consumer("ticks", group="told", missed="skip") as consumer:
        assert consumer.poll()[0].offset == log.offsets("ticks")[0].start
        assert consumer.missed == missed.value.count


def test_a_queue_over_removed_and_compacted_events_ends(log: hw.Log) -> None:
    """What is gone is not waited for: everything that is left is leased once, and then nothing is."""
    for topic in ("prices", "ticks"):
        with log.queue(topic, group="workers") as queue:
            offsets = []
            while leases := queue.lease(timeout_s=0.2):
                offsets += [lease.event.offset for lease in leases]
                queue.ack(leases)
            assert offsets == log.read(topic, columns=["_offset"])["_offset"].to_pylist()
            assert queue.depth().ready == 0
