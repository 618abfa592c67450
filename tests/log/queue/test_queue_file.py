"""Queues of the local log: power losses, windows in files, a backlog that stays on disk, and the command line."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headwater as hw
from headwater.cli.main import main
from headwater.log.doctor.doctor import examine
from headwater.log.port.lease_engine import Order
from headwater.log.queue.depth import Depth
from headwater.log.queue.lease import Lease
from headwater.log.queue.partition import QueuePartition
from headwater.log.queue.queue import Queue
from headwater.log.queue.window import (
    CAPACITY_MIN,
    FAR_US,
    Window,
    checked_number,
    empty_header,
    number_of,
    window_bytes,
)
from headwater.model import clock
from headwater.model.errors import Damaged, FormatTooNew, InvalidInput, LeaseExpired
from headwater.testing import SimDisk
from headwater.testing.contracts.case import refused, values_of
from headwater.testing.crash.points import queue_recovery_points
from headwater.testing.simulation.process import Crashed
from tests.rigs.children import in_child
from tests.rigs.interrupts import interrupt_in, run_interrupted

SEEDS = range(8)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "log")


def drain(queue: Queue) -> list[bytes]:
    values = []
    while leases := queue.lease(timeout_s=0):
        values += [lease.event.value for lease in leases]
        queue.ack(leases)
    return values


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_power_loss_delivers_again_and_loses_nothing(durability: str) -> None:
    """Whatever of windows and events reached the disk: all that is in the topic and was not acknowledged is delivered.

    With "os" the topic itself goes back and its offsets are given again: the new events there are delivered too.
    """
    came_again = 0
    for seed in SEEDS:
        chance, disk = random.Random(seed), SimDisk(seed)
        acked: set[bytes] = set()
        number = 0
        for life in range(3):
            log = hw.open_log("/disk/log", durability=durability, disk=disk.process(f"p{life}"))
            if life == 0:
                log.create_topic("tasks", partitions=2)
            queue = log.queue("tasks", deliveries_max=None, order="key" if seed % 2 else "none")
            there = set(values_of(log, "tasks"))
            if life:
                leases = queue.lease(events_max=100_000, timeout_s=0)
                found = {lease.event.value for lease in leases}
                while not seed % 2 or found != there:
                    queue.ack(leases)
                    leases = queue.lease(events_max=100_000, timeout_s=0)
                    if not leases:
                        break
                    found |= {lease.event.value for lease in leases}
                came_again += len(found & acked)
                assert there - acked <= found <= there, f"seed {seed}, life {life}"
                queue.ack(leases)
                acked |= found
            for _ in range(chance.randint(1, 6)):
                rows = [
                    {"key": b"%d" % chance.randrange(700), "value": b"%d" % (number + n)}
                    for n in range(chance.choice([1, 30, 600]))
                ]
                number += len(rows)
                log.append("tasks", rows)
                leases = queue.lease(events_max=chance.randint(1, 4_000), timeout_s=0)
                chosen = [lease for lease in leases if chance.random() < 0.7]
                queue.ack(chosen)
                acked |= {lease.event.value for lease in chosen}
            disk.power_loss()
    assert came_again > 0


@pytest.mark.parametrize("order", ["none", "key"])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.bench) for n in range(1000, 1100))])
def test_a_power_loss_doubles_no_unit_of_work_and_no_dead_letter(seed: int, order: Order) -> None:
    """What a transaction acknowledged, and what is a dead letter, does not come again; everything else does."""
    print(f"seed {seed}")
    work_through_power_losses(seed, order)


@pytest.mark.parametrize("order", ["none", "key"])
def test_a_mistake_is_found_out(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the acknowledgements being replayed after a power loss, one of the histories above does some work twice."""
    monkeypatch.setattr(QueuePartition, "_acks", lambda *_: iter(()))
    for seed in SEEDS:
        try:
            work_through_power_losses(seed, order)
        except AssertionError:
            return
    pytest.fail(f"{len(SEEDS)} histories, and nobody noticed that units of work are done twice.")


def work_through_power_losses(seed: int, order: Order) -> None:
    chance, disk = random.Random(seed), SimDisk(seed)
    number, rejected = 0, set[bytes]()
    for life in range(4):
        log = hw.open_log("/disk/log", disk=disk.process(f"p{life}"))
        if life == 0:
            log.create_topic("tasks", partitions=2, segment_bytes=chance.choice([4096, 1 << 20]))
            log.create_topic("results", partitions=1)
        queue = log.queue("tasks", deliveries_max=2, order=order)
        for _ in range(chance.randint(1, 12)):
            rows = [
                {"key": b"%d" % chance.randrange(50), "value": b"%d" % (number + n)}
                for n in range(chance.choice([1, 20, 300]))
            ]
            number += len(rows)
            log.append("tasks", rows)
            leases = queue.lease(events_max=chance.choice([5, 50, 5_000]), timeout_s=0)
            fates: dict[str, list[Lease]] = {fate: [] for fate in ("unit", "reject", "nack", "keep")}
            for lease in leases:
                fates[chance.choice(["unit", "unit", "reject", "nack", "keep"])].append(lease)
            work_in_a_unit(log, fates["unit"])
            queue.reject(fates["reject"], "poison")
            rejected |= {lease.event.value for lease in fates["reject"]}
            queue.nack(fates["nack"])
            if "tasks.default.acks" in log.topics() and chance.random() < 0.5:
                log.tidy("tasks.default.acks")
        disk.power_loss()
    with hw.open_log("/disk/log", disk=disk.process("last")) as log, log.queue("tasks", order=order) as queue:
        while leases := queue.lease(timeout_s=0):
            work_in_a_unit(log, leases)
        results, dead = values_of(log, "results"), values_of(log, "tasks.dead")
        assert len(results + dead) == len(set(results + dead)), "done twice, or done and dead"
        assert set(results + dead) == {b"%d" % n for n in range(number)}
        assert rejected <= set(dead)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.bench) for n in range(1000, 1100))])
def test_what_was_acknowledged_of_lost_events_is_not_taken_for_others_at_their_offsets(seed: int) -> None:
    """With "os" a power loss takes events back, and others get their offsets: these are delivered, however often it happens."""
    print(f"seed {seed}")
    chance, disk = random.Random(seed), SimDisk(seed)
    number, reused = 0, 0
    for life in range(6):
        log = hw.open_log("/disk/log", durability="os", disk=disk.process(f"p{life}"))
        if life == 0:
            log.create_topic("tasks", partitions=1)
            log.create_topic("results", partitions=1)
        queue = log.queue("tasks", deliveries_max=1)
        for _ in range(chance.randint(1, 5)):
            rows = [b"%d" % (number + n) for n in range(chance.choice([1, 20, 100]))]
            number += len(rows)
            log.append("tasks", rows)
            leases = queue.lease(events_max=chance.choice([5, 50, 500]), timeout_s=0)
            work_in_a_unit(log, [lease for lease in leases if chance.random() < 0.5])
        before = log.offsets("tasks")[0].stop
        disk.power_loss()
        with hw.open_log("/disk/log", disk=disk.process(f"look{life}")) as log:
            reused += log.offsets("tasks")[0].stop < before
    with hw.open_log("/disk/log", disk=disk.process("last")) as log, log.queue("tasks") as queue:
        while leases := queue.lease(timeout_s=0):
            work_in_a_unit(log, leases)
        assert set(values_of(log, "tasks")) <= set(values_of(log, "results")), "an event was passed over"
    print(f"{reused} power losses took events back")


@pytest.mark.parametrize("point", queue_recovery_points())
@pytest.mark.parametrize("loses_power_again", [False, True])
def test_a_process_dies_while_it_puts_a_queue_in_order_after_a_power_loss(point: str, loses_power_again: bool) -> None:
    """Whoever comes next does it again: what was done once stays done, and everything else comes."""
    for seed in range(4):
        disk = SimDisk(seed)
        log = hw.open_log("/disk/log", disk=disk.process("first"))
        for name in ("tasks", "results"):
            log.create_topic(name, partitions=1)
        log.append("tasks", [b"%d" % n for n in range(200)])
        work_in_a_unit(log, log.queue("tasks").lease(timeout_s=0)[1::2])
        disk.power_loss()
        disk.crash_at("second", point)
        with pytest.raises(Crashed):
            hw.open_log("/disk/log", disk=disk.process("second")).queue("tasks").lease(timeout_s=0)
        if loses_power_again:
            disk.power_loss()
        with hw.open_log("/disk/log", disk=disk.process("third")) as log, log.queue("tasks") as queue:
            assert drain(queue) == [b"%d" % n for n in range(0, 200, 2)], f"seed {seed}"


def work_in_a_unit(log: hw.Log, leases: list[Lease]) -> None:
    with log.transaction() as unit:
        unit.append("results", [lease.event.value for lease in leases])
        unit.ack(leases)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_power_loss_sends_no_dead_letter_back_twice(seed: int) -> None:
    """Sending back and acknowledging is one transaction."""
    chance, disk = random.Random(seed), SimDisk(seed)
    for life in range(4):
        log = hw.open_log("/disk/log", disk=disk.process(f"p{life}"))
        if life == 0:
            log.create_topic("tasks", partitions=2)
            log.append("tasks", [b"%d" % n for n in range(40)])
            queue = log.queue("tasks")
            queue.reject(queue.lease(timeout_s=0), "poison")
        else:
            log.queue("tasks").redrive(events_max=chance.randint(1, 15))
        disk.power_loss()
    with hw.open_log("/disk/log", disk=disk.process("last")) as log, log.queue("tasks") as queue:
        queue.redrive()
        assert sorted(drain(queue), key=int) == [b"%d" % n for n in range(40)]
        assert queue.dead() == []


@pytest.mark.parametrize("how", ["seek", "made anew", "forgotten"])
def test_what_is_to_be_delivered_again_is_not_taken_for_done_after_a_power_loss(how: str) -> None:
    """Acknowledgements of before a seek, of an older topic of that name or of a group that was deleted say nothing."""
    for seed in SEEDS:
        disk = SimDisk(seed)
        log = hw.open_log("/disk/log", disk=disk.process("first"))
        for name in ("tasks", "results"):
            log.create_topic(name, partitions=1)
        values = [b"%d" % n for n in range(20)]
        log.append("tasks", values)
        queue = log.queue("tasks")
        leases = queue.lease(timeout_s=0)
        work_in_a_unit(log, leases[1:])
        if how == "seek":
            queue.seek("earliest")
        queue.close()
        if how == "made anew":
            log.delete_topic("tasks")
            log.create_topic("tasks", partitions=1)
            log.append("tasks", values)
        if how == "forgotten":
            log.delete_queue("tasks")
        with log.queue("tasks") as queue:
            (lease,) = queue.lease(events_max=1, timeout_s=0)
            if how != "seek":
                work_in_a_unit(log, [lease])
                values = values[1:]
        disk.power_loss()
        with hw.open_log("/disk/log", disk=disk.process("last")) as log, log.queue("tasks") as queue:
            assert drain(queue) == values, f"seed {seed}"


class Machine:
    """A machine whose clock can be set, beside one that cannot: what `headwater.model.clock` takes for the module `time`."""

    CLOCK_BOOTTIME = 7

    def __init__(self) -> None:
        self.date_s, self.steady_s = 1_800_000_000, 5_000

    def time_ns(self) -> int:
        return self.date_s * 10**9

    def clock_gettime_ns(self, clock: int) -> int:
        assert clock == self.CLOCK_BOOTTIME
        return self.steady_s * 10**9

    def let_pass(self, s: int) -> None:
        self.date_s += s
        self.steady_s += s


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clock, "time", machine)
    return machine


@pytest.mark.parametrize("order", ["none", "key"])
@pytest.mark.parametrize("set_by_s", [-3_600, 3_600])
@pytest.mark.parametrize("url", ["file", "memory://"])
def test_leases_and_delays_do_not_follow_a_clock_that_is_set(
    folder: str, machine: Machine, url: str, set_by_s: int, order: Order
) -> None:
    """Each lasts as long as it was asked for, in every handle, and what looks at the queue says so."""
    with hw.open_log(folder if url == "file" else url) as log:
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [{"key": value, "value": value} for value in (b"delayed", b"extended", b"leased")])
        with log.queue("tasks", lease_s=30, order=order) as queue, log.queue("tasks", lease_s=30, order=order) as other:
            delayed, extended, _ = queue.lease(timeout_s=0)
            machine.date_s += set_by_s
            delayed.nack(delay_s=60)
            extended.extend(90)
            machine.date_s += set_by_s

            def comes() -> list[bytes]:
                return [lease.event.value for lease in other.lease(timeout_s=0)]

            machine.let_pass(29)
            assert comes() == [] and queue.depth() == Depth(ready=0, leased=2, scheduled=1, dead=0)
            assert [(entry.due_us // 10**6 - machine.date_s) for entry in queue.browse()] == [31, 61, 1]
            machine.let_pass(2)
            assert comes() == [b"leased"]
            machine.let_pass(28)
            assert comes() == []
            machine.let_pass(2)
            assert b"delayed" in comes()
            machine.let_pass(28)
            assert b"extended" not in comes()
            machine.let_pass(2)
            assert b"extended" in comes()


@pytest.mark.parametrize("url", ["file", "memory://"])
def test_what_is_scheduled_for_a_date_follows_the_clock(folder: str, machine: Machine, url: str) -> None:
    """A date is what the machine's clock says, also after it was set."""
    with hw.open_log(folder if url == "file" else url) as log:
        log.create_topic("tasks", partitions=1)
        with log.queue("tasks", lease_s=10_000) as queue:
            queue.send(b"later", at=(machine.date_s + 3_600) * 10**6)
            queue.send(b"now")
            assert [lease.event.value for lease in queue.lease(timeout_s=0)] == [b"now"]
            machine.date_s -= 3_600
            machine.let_pass(3_600)
            assert queue.lease(timeout_s=0) == [] and queue.depth().scheduled == 1
            machine.date_s += 3_600
            assert [lease.event.value for lease in queue.lease(timeout_s=0)] == [b"later"]


@pytest.mark.parametrize("order", ["none", "key"])
@pytest.mark.parametrize("set_by_s", [-3_600, 3_600])
@pytest.mark.parametrize("url", ["file", "memory://"])
def test_a_delay_that_an_event_is_sent_with_does_not_follow_a_clock_that_is_set(
    folder: str, machine: Machine, url: str, set_by_s: int, order: Order
) -> None:
    """However the clock is set, before it is looked at or after; and it holds up no later event of its key."""
    with hw.open_log(folder if url == "file" else url) as log:
        log.create_topic("tasks", partitions=1)
        with log.queue("tasks", lease_s=10_000, order=order) as queue:
            queue.send(b"delayed", key=b"k", delay_s=60)
            machine.date_s += set_by_s
            queue.send(b"now", key=b"k")
            leases = queue.lease(timeout_s=0)
            assert [lease.event.value for lease in leases] == [b"now"]
            queue.ack(leases)
            machine.date_s += set_by_s
            machine.let_pass(59)
            assert queue.lease(timeout_s=0) == []
            machine.let_pass(2)
            assert [lease.event.value for lease in queue.lease(timeout_s=0)] == [b"delayed"]


@pytest.mark.parametrize("date_is_off_by_s", [-86_400, 0, 86_400])
def test_a_delay_of_before_a_restart_of_the_machine_lasts_no_longer_than_if_it_began_now(
    folder: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, date_is_off_by_s: int
) -> None:
    """Whatever the date is then: by that it ends, but never later."""
    with hw.open_log(folder) as log:
        log.create_topic("tasks", partitions=1)
        with log.queue("tasks") as queue:
            queue.send(b"delayed", delay_s=60)
    monkeypatch.setattr(clock.SteadyClock, "boot_id", lambda self: "another")
    machine.date_s, machine.steady_s = machine.date_s + 40 + date_is_off_by_s, 3
    with hw.open_log(folder) as log, log.queue("tasks") as queue:
        waits_s = {-86_400: 60, 0: 20, 86_400: 0}[date_is_off_by_s]
        if waits_s:
            assert queue.lease(timeout_s=0) == []
            machine.let_pass(waits_s - 1)
            assert queue.lease(timeout_s=0) == []
            machine.let_pass(2)
        assert drain(queue) == [b"delayed"]


def test_leases_and_delays_of_before_a_restart_of_the_machine_are_over(machine: Machine) -> None:
    """Its clock begins again, whatever the date is then: what was leased or given back comes at once."""
    disk = SimDisk(0)
    log = hw.open_log("/disk/log", disk=disk.process("before"))
    log.create_topic("tasks", partitions=1)
    log.append("tasks", [b"delayed", b"leased"])
    delayed, _ = log.queue("tasks", lease_s=600).lease(timeout_s=0)
    delayed.nack(delay_s=600)
    disk.power_loss()
    machine.date_s, machine.steady_s = machine.date_s - 86_400, 3
    with hw.open_log("/disk/log", disk=disk.process("after")) as log, log.queue("tasks") as queue:
        assert drain(queue) == [b"delayed", b"leased"]


def test_a_window_from_before_clocks_were_told_apart_is_gone_on_with(folder: str, machine: Machine) -> None:
    """Its leases and delays have dates, and end when the clock that nobody sets has come there."""
    with hw.open_log(folder) as log:
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"leased", b"delayed"])
        queue = log.queue("tasks", lease_s=30)
        queue.lease(timeout_s=0)
        path = Path(folder) / "queues/default/tasks/0.window"
        raw = bytearray(path.read_bytes())
        raw[8 * 9 : 8 * 12] = bytes(24)  # what was not there
        due = (machine.date_s + 60) * 10**6 << 12 | 1 << 3  # READY, delivered once
        struct.pack_into("<Q", raw, 4096 + 8, due | (due.bit_count() & 1) << 11)
        path.write_bytes(raw)
        machine.date_s += 1
        with log.queue("tasks", deliveries_max=None) as other:
            assert other.lease(timeout_s=0) == []
            machine.let_pass(31)
            assert [lease.event.value for lease in other.lease(timeout_s=0)] == [b"leased"]
            machine.let_pass(31)
            assert b"delayed" in [lease.event.value for lease in other.lease(timeout_s=0)]


def test_a_window_that_is_damaged_is_named(folder: str) -> None:
    """And one of a newer format is refused; the advice says what deleting it means."""
    with hw.open_log(folder) as log:
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"a", b"b"])
        with log.queue("tasks") as queue:
            queue.ack(queue.lease(events_max=1))
    path = Path(folder) / "queues/default/tasks/0.window"
    whole = path.read_bytes()
    for broken, kind in (
        (b"HWHEAD" + whole[6:], Damaged),
        (whole[:6] + b"\x02" + whole[7:], FormatTooNew),
        (whole[:-8], Damaged),
        (whole[:8] + b"\x03" + whole[9:], Damaged),
    ):
        path.write_bytes(broken)
        with hw.open_log(folder) as log, log.queue("tasks") as queue, refused(kind, "0.window"):
            queue.lease(timeout_s=0)
    path.unlink()
    with hw.open_log(folder) as log, log.queue("tasks") as queue:
        assert drain(queue) == [b"a", b"b"]


def test_a_flipped_bit_of_a_window_is_named_or_delivers_again(folder: str) -> None:
    """No event that nobody acknowledged is passed over, whichever bit it is; the doctor names it too, and its repair delivers anew."""
    with hw.open_log(folder) as log:
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [{"key": b"%d" % (n % 3), "value": b"%d" % n} for n in range(10)])
        with log.queue("tasks", lease_s=600, order="key") as queue:
            leases = queue.lease(events_max=6)
            queue.ack(leases[:1])
            queue.nack(leases[1:])
    path = Path(folder) / "queues/default/tasks/0.window"
    whole = path.read_bytes()
    capacity = (len(whole) - 4096) // 24
    header = [*range(8 * 9), *range(256, 292)]
    words, keys = ([4096 + 8 * capacity * ring + at for at in range(8, 8 * 6)] for ring in (0, 2))
    chance = random.Random(0)
    for at in [*header, *chance.sample(words, 12), *chance.sample(keys, 12)]:
        raw = bytearray(whole)
        raw[at] ^= 1 << (bit := chance.randrange(8))
        path.write_bytes(raw)
        found = [finding for finding in examine(folder).findings if finding.path == str(path)]
        assert found and not examine(folder).healthy, f"bit {bit} of byte {at} was not found"
        with (
            hw.open_log(folder) as log,
            log.queue("tasks", order="key") as queue,
            pytest.raises((Damaged, FormatTooNew), match=r"0\.window"),
        ):
            queue.lease(timeout_s=0)
    for at in chance.sample(range(4096 + 8 * capacity, 4096 + 8 * capacity + 80), 8):  # tokens
        raw = bytearray(whole)
        raw[at] ^= 1 << chance.randrange(8)
        path.write_bytes(raw)
        assert examine(folder).healthy
        with hw.open_log(folder) as log, log.queue("tasks", order="key", deliveries_max=None) as queue:
            assert set(drain(queue)) == {b"%d" % n for n in range(10)} - {leases[0].event.value}
    raw = bytearray(whole)
    raw[16] ^= 1
    path.write_bytes(raw)
    assert [finding.repaired for finding in examine(folder, repair=True).findings] == [True]
    with hw.open_log(folder) as log, log.queue("tasks", order="key") as queue:
        assert set(drain(queue)) == {b"%d" % n for n in range(10)}


@pytest.mark.parametrize("order", ["none", "key", "sticky"])
def test_a_cut_queue_is_mended_and_what_was_acknowledged_stays_so(folder: str, order: Any) -> None:
    """Who opens it next says what it is; meanwhile nothing is given up that its group has yet to read. It can be deleted at once, too."""
    with hw.open_log(folder) as log:
        log.create_topic("tasks", partitions=1, retain="until_acked")
        log.append("tasks", [b"%d" % n for n in range(10)])
        with log.queue("tasks", order=order, dead="graves") as queue:
            queue.ack(queue.lease(events_max=4))
    path = Path(folder) / "queues/default/tasks/queue"
    for left in (0, 9, path.stat().st_size - 1):
        os.truncate(path, left)
        assert [finding.path for finding in examine(folder).findings] == [str(path)]
        with hw.open_log(folder) as log, refused(Damaged, str(path), "--repair"):
            log.store.queues()
        [found] = examine(folder, repair=True).findings
        assert found.repaired and "acknowledged stays so" in found.note
        assert examine(folder).findings == []
        with hw.open_log(folder) as log:
            log.tidy("tasks")
            with log.queue("tasks", order=order, dead="graves") as queue:
                assert len(queue.lease()) == 6
            assert log.store.queues()[0]["order"] == order
            with refused(InvalidInput, "graves"):
                log.queue("tasks", order=order, dead="others")
    os.truncate(path, 0)
    with hw.open_log(folder) as log:
        log.delete_queue("tasks")
        assert log.store.queues() == []


def test_every_number_of_a_window_has_a_check_that_no_single_bit_passes() -> None:
    """Of the header's numbers, which are offsets and times, and of the words of events."""
    chance = random.Random(0)
    for value in [0, 1, FAR_US, *(chance.randrange(1 << chance.randint(1, 52)) for _ in range(2_000))]:
        word = checked_number(value)
        assert number_of(word) == value
        for bit in range(64):
            flipped = word ^ 1 << bit
            assert checked_number(number_of(flipped)) != flipped, f"bit {bit} of {value}"


@pytest.mark.covers("HornetQ", backends=["file"])
def test_a_backlog_far_above_memory_stays_on_disk(folder: str) -> None:
    """A consumer does all of a backlog of 160 MB in a process that the kernel gives 48 MB more than it needs to begin.

    That the limit is one shows a process that wants to hold the backlog: it gets no memory.
    """
    batches, rows, size = 40, 4_000, 1_000
    with hw.open_log(folder, durability="os") as log:
        log.create_topic("tasks", partitions=2, segment_bytes=16 << 20)
        payload = np.random.default_rng(0).bytes(rows * size)
        offsets = pa.py_buffer(np.arange(0, rows * size + 1, size, dtype=np.int32))
        values = pa.Array.from_buffers(pa.binary(), rows, [None, offsets, pa.py_buffer(payload)])
        for _ in range(batches):
            log.append("tasks", pa.table({"value": values}))

    def consume() -> int:
        with hw.open_log(folder) as log, log.queue("tasks") as queue:
            done = 0
            while leases := queue.lease(events_max=500, timeout_s=0):
                for lease in leases:
                    lease.ack()
                done += len(leases)
                if done == len(leases):
                    queue.flush()
                    limit_memory(48 << 20)
            assert queue.depth() == Depth(ready=0, leased=0, scheduled=0, dead=0)
            return done

    def hold() -> int:
        with hw.open_log(folder) as log, log.reader("tasks") as reader:
            held = reader.poll(events_max=500)
            limit_memory(48 << 20)
            try:
                while events := reader.poll(events_max=500, timeout_s=0):
                    held += events
            except MemoryError:
                return len(held)
            return -1

    assert 0 < in_child(hold) < batches * rows
    assert in_child(consume) == batches * rows


def limit_memory(more_bytes: int) -> None:
    """This process gets so much more memory that is not a file's, and not one page beyond that."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    limit = int(found[1]) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def test_the_floor_moves_over_what_is_acknowledged_only() -> None:
    """A window against a dictionary, at random, over the end of the ring and with growth."""
    for seed in range(8):
        chance = random.Random(seed)
        start = chance.choice([0, CAPACITY_MIN - 5, 10 * CAPACITY_MIN + 17])
        window = make_window(CAPACITY_MIN, start)
        states: dict[int, tuple[str, int]] = {}
        end = start
        for step in range(120):
            now = 1_000 + step
            if window.room < 700:
                larger = make_window(2 * window.capacity, window.floor)
                window.copy_to(larger)
                window = larger
            dice = chance.random()
            if dice < 0.4:
                count = chance.randint(1, 300)
                offsets = window.add_leased(count, token=step, deadline=now + chance.randint(1, 40))
                assert offsets.tolist() == list(range(end, end + count))
                states |= dict.fromkeys(offsets.tolist(), ("out", step))
                end += count
            elif dice < 0.7 and states:
                some = np.array(sorted(chance.sample(sorted(states), min(len(states), 100))))
                token = chance.choice(list(states.values()))[1]
                held = window.holds(some, token)
                assert held.tolist() == [states[offset] == ("out", token) for offset in some.tolist()]
                window.settle(some[held])
                states = {offset: state for offset, state in states.items() if offset not in set(some[held].tolist())}
            else:
                found, _ = window.due(now, 100)
                counts = window.take(found, token=step, deadline=now + chance.randint(1, 40))
                assert (counts >= 2).all()
                assert set(found.tolist()) <= set(states)
                states |= dict.fromkeys(found.tolist(), ("out", step))
            assert (window.floor, window.next) == (min(states, default=end), end)
            assert window.entries()[0].tolist() == sorted(states)


def make_window(capacity: int, floor: int) -> Window:
    buffer = bytearray(window_bytes(capacity, has_keys=False))
    header = empty_header(capacity=capacity, has_keys=False, topic_id="t", floor=floor, incarnation=0)
    buffer[: len(header)] = header
    return Window(memoryview(buffer), "memory")


def test_an_interrupt_leaves_nothing_locked_and_loses_nothing(folder: str) -> None:
    """Ctrl-C at any instruction of leasing, settling and units of work: everybody goes on, and every event is done."""
    run_interrupted(work_interrupted, folder)


def work_interrupted(folder: str) -> None:
    chance, total, acked = random.Random(5), 0, set[bytes]()
    log = hw.open_log(folder, durability="os")
    log.create_topic("tasks", partitions=2)
    log.create_topic("done", partitions=1)
    queue = log.queue("tasks", lease_s=0.05, deliveries_max=None)
    for _ in range(250):
        log.append("tasks", [b"%d" % n for n in range(total, total + 5)])
        total += 5
        with suppress(KeyboardInterrupt, LeaseExpired):
            try:
                interrupt_in(chance.uniform(0.0001, 0.003))
                first, *rest = queue.lease(events_max=5, timeout_s=0) or [None]
                if first is not None:
                    first.nack()
                    with log.transaction() as tx:
                        tx.ack(rest[:1])
                        tx.append("done", [b"x"])
                    acked |= {lease.event.value for lease in rest[:1]}
                    queue.ack(rest[1:3])
                    acked |= {lease.event.value for lease in rest[1:3]}
                    for lease in rest[3:]:
                        lease.ack()
                    queue.flush()
                    acked |= {lease.event.value for lease in rest[3:]}
                time.sleep(0.004)
            finally:
                interrupt_in(0)
    with hw.open_log(folder) as other, other.queue("tasks", deliveries_max=None) as second:
        found = []
        while (depth := second.depth()).ready + depth.leased:
            leases = second.lease(timeout_s=0.1)
            found += [lease.event.value for lease in leases]
            second.ack(leases)
        assert second.floors() == {number: held.stop for number, held in other.offsets("tasks").items()}
    assert len(set(found)) == len(found)
    assert not acked & set(found)
    log.append("tasks", [b"after"])
    assert [lease.event.value for lease in queue.lease()] == [b"after"]
    log.close()


# The command line


def cli(folder: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    sys.argv = ["headwater", *arguments, "--log", folder]
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_queues_are_listed_shown_and_looked_into(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And dead letters are shown with their reason and sent back."""
    monkeypatch.setattr(sys, "argv", ["headwater"])
    with hw.open_log(folder) as log:
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"done", b"poison", b"left", b"\xff"])
        with log.queue("tasks", group="workers", deliveries_max=1) as queue:
            done, poison, _, _ = queue.lease()
            done.ack()
            poison.nack(reason="no such customer")
    code, out, _ = cli(folder, capsys, "queues", "list", "--json")
    assert (code, json.loads(out)) == (
        0,
        {"topic": "tasks", "group": "workers", "order": "none", "ready": 2, "leased": 0, "scheduled": 0, "dead": 1},
    )
    code, out, _ = cli(folder, capsys, "queues", "show", "tasks")
    assert code == 0 and "2 ready, 0 leased, 0 scheduled, 1 dead" in out
    code, out, _ = cli(folder, capsys, "queues", "peek", "tasks", "--json")
    assert [json.loads(line)["value"] for line in out.splitlines()] == ["left", "\\xff"]
    code, out, _ = cli(folder, capsys, "queues", "dead", "tasks")
    assert code == 0 and "no such customer" in out and "poison" in out
    code, out, _ = cli(folder, capsys, "queues", "redrive", "tasks")
    assert (code, out) == (0, "1 event sent back to tasks, for group workers\n")
    with hw.open_log(folder) as log:
        log.queue("tasks", group="others").close()
    code, _, err = cli(folder, capsys, "queues", "peek", "tasks")
    assert code == 1 and "others, workers" in err
    code, _, err = cli(folder, capsys, "queues", "peek", "tasks", "--group", "nobody")
    assert code == 1 and "queues list" in err
