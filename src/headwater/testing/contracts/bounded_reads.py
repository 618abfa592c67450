"""The contract of bounded reading: ranges by offset, time and position, columns, and offsets by time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from headwater.log.clients.reader import Start
from headwater.log.log import Log
from headwater.model.errors import InvalidInput
from headwater.model.position import Position
from headwater.testing.contracts.case import NOON, ORDERS, LogCase, events_of, order, orders, refused

DAY = timedelta(days=1)

WRONG_PLACES: list[Any] = [-1, 11, 1.5, "yesterday", {0: 11}, {0: "x"}, {"0": 1}, [7], [None], object(), b"earliest"]


class ReadContract(LogCase):
    """What holds for `read`, `scan` and `offsets_at`."""

    def test_a_range_by_offset_ends_before_its_end(self, log: Log) -> None:
        """One number for all partitions, or one for each."""
        log.create_topic("orders", ORDERS, partitions=1)
        log.append("orders", orders(4))
        log.append("orders", orders(6, start=4))
        for start, end in ((0, 10), (3, 7), (4, 5), (5, 5), (7, 3), (0, 0), (10, 10)):
            rows = log.read("orders", start=start, end=end).column("amount").to_pylist()
            assert rows == [float(n) for n in range(start, end)]
            assert log.read("orders", start={0: start}, end={0: end}).num_rows == len(rows)
        assert log.read("orders", start=8).num_rows == 2
        assert log.read("orders", end=8).num_rows == 8
        assert log.read("orders", start="earliest", end="latest").num_rows == 10

    def test_a_partition_that_a_mapping_leaves_out_is_read_from_its_first_event(self, log: Log) -> None:
        """A mapping says where some partitions begin."""
        log.create_topic("orders", ORDERS, key="id", partitions=3)
        log.append("orders", orders(30))
        all_of = log.offsets("orders")
        found = log.read("orders", start={1: all_of[1].stop}, columns=["_partition"]).column("_partition").to_pylist()
        assert found == [0] * len(all_of[0]) + [2] * len(all_of[2])

    def test_a_range_by_time_begins_at_the_first_event_of_that_time(self, log: Log) -> None:
        """A datetime or an ISO string, of event time."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=2)
        for start in range(0, 60, 7):
            log.append("orders", orders(min(7, 60 - start), start=start))
        at = NOON + timedelta(seconds=20)
        until = NOON + timedelta(seconds=45)
        ranges: list[tuple[Start, Start]] = [(at, until), (at.isoformat(), until.isoformat())]
        for begin, end in ranges:
            amounts = log.read("orders", start=begin, end=end).column("amount").to_pylist()
            assert sorted(amounts) == [float(n) for n in range(20, 45)]

    def test_a_range_by_positions_is_what_lies_between(self, log: Log) -> None:
        """Positions of a reader are places to begin and to end."""
        log.create_topic("orders", ORDERS, key="id", partitions=2)
        log.append("orders", orders(10))
        with log.reader("orders", start="latest") as reader:
            places = reader.positions()
        log.append("orders", orders(10, start=10))
        assert sorted(log.read("orders", end=places).column("amount").to_pylist()) == [float(n) for n in range(10)]
        assert sorted(log.read("orders", start=places).column("amount").to_pylist()) == [
            float(n) for n in range(10, 20)
        ]

    @pytest.mark.parametrize("place", WRONG_PLACES, ids=lambda place: f"{place!r:.20}")
    def test_a_place_that_is_not_there_is_refused(self, log: Log, place: Any) -> None:
        """An offset out of range, a time nobody can read, a thing of another kind."""
        log.create_topic("orders", ORDERS, partitions=1)
        log.append("orders", orders(10))
        with refused(InvalidInput):
            log.read("orders", start=place)
        with refused(InvalidInput):
            log.read("orders", end=place)
        with refused(InvalidInput):
            log.reader("orders", start=place)
        with log.reader("orders") as reader:
            reader.poll(events_max=3)
            with refused(InvalidInput):
                reader.seek(place)
            assert reader.poll(events_max=1)[0].offset == 3

    def test_a_position_of_another_place_is_refused(self, log: Log) -> None:
        """Not taken for the nearest one that is there."""
        log.create_topic("orders", ORDERS, partitions=1)
        log.append("orders", orders(3))
        for position in (Position("orders", 0, 4), Position("orders", 0, -1)):
            with refused(InvalidInput, str(position.offset)):
                log.read("orders", start=[position])

    def test_columns_are_picked_and_the_logs_own_can_be_asked_for(self, log: Log) -> None:
        """In the order they were asked in."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=1)
        log.append("orders", [{**order(7), "_headers": {"h": b"1"}}])
        asked = [
            "_offset",
            "amount",
            "_partition",
            "_topic",
            "_key",
            "_time",
            "_appended",
            "_headers",
            "_deleted",
            "id",
        ]
        table = log.read("orders", columns=asked)
        [row] = table.to_pylist()
        assert table.schema.names == list(row) == asked
        [event] = events_of(log, "orders")
        assert row == {
            "_offset": 0,
            "amount": 7.0,
            "_partition": 0,
            "_topic": "orders",
            "_key": "o7",
            "_time": event.time,
            "_appended": event.appended,
            "_headers": [("h", b"1")],
            "_deleted": False,
            "id": "o7",
        }

    def test_the_time_column_is_the_events_time(self, log: Log) -> None:
        """Also where an event has none of its own, or its topic declares none: the time it was appended."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=1)
        log.create_topic("raw", partitions=1)
        log.append("orders", [order(1), {"id": "timeless"}])
        log.append("raw", [b"x"])
        for topic in ("orders", "raw"):
            times = log.read(topic, columns=["_time"]).column("_time").to_pylist()
            assert times == [event.time for event in events_of(log, topic)]

    @pytest.mark.parametrize("columns", [["nothing"], ["id", "_nothing"], [""], [None], [7]], ids=repr)
    def test_an_unknown_column_is_refused(self, log: Log, columns: Any) -> None:
        """The error says which ones there are."""
        log.create_topic("orders", ORDERS)
        for use in (log.read, log.scan, log.reader):
            with refused(InvalidInput, "amount"):
                use("orders", columns=columns)

    def test_a_scan_streams_what_read_gives_at_once(self, log: Log) -> None:
        """In several batches where there is much, with the same rows in the same order."""
        log.create_topic("numbers", "n BIGINT", key="n", partitions=3)
        for start in range(0, 300_000, 100_000):
            log.append("numbers", pa.record_batch({"n": pa.array(range(start, start + 100_000))}))
        log.append("numbers", [{"n": 300_000}])
        stream = log.scan("numbers", columns=["n", "_partition", "_offset"])
        assert isinstance(stream, pa.RecordBatchReader)
        batches = list(stream)
        assert len(batches) > 1
        assert pa.Table.from_batches(batches) == log.read("numbers", columns=["n", "_partition", "_offset"])

    def test_a_scan_ends_where_the_log_ended_when_it_began(self, log: Log) -> None:
        """What is appended meanwhile does not belong to it."""
        log.create_topic("raw", partitions=1)
        log.append("raw", [b"x"] * 10)
        stream = log.scan("raw")
        log.append("raw", [b"y"] * 10)
        assert stream.read_all().num_rows == 10

    def test_offsets_at_a_time_are_those_of_the_first_event_not_before_it(self, log: Log) -> None:
        """The first offset where nothing is older, the end where nothing is newer."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=2)
        for start in range(0, 40, 4):
            log.append("orders", orders(4, start=start))
        events = events_of(log, "orders")
        for second in (-5, 0, 1, 13, 39, 40, 1000):
            at = NOON + timedelta(seconds=second)
            expected = {
                number: min(
                    (event.offset for event in events if event.partition == number and event.time >= at),
                    default=log.offsets("orders")[number].stop,
                )
                for number in range(2)
            }
            assert log.offsets_at("orders", at) == log.offsets_at("orders", at.isoformat()) == expected

    def test_offsets_at_an_append_time_are_found_by_the_logs_clock(self, log: Log) -> None:
        """With `by="appended"`, and for topics without a time column always."""
        log.create_topic("orders", ORDERS, time="at", partitions=1)
        log.create_topic("raw", partitions=1)
        for number in range(5):
            log.append("orders", [order(100 - number)] * 3)
            log.append("raw", [b"x"] * 3)
            time.sleep(0.002)
        for topic in ("orders", "raw"):
            for event in events_of(log, topic)[::3]:
                assert log.offsets_at(topic, event.appended, by="appended") == {0: event.offset}
                late = event.appended + timedelta(microseconds=1)
                assert log.offsets_at(topic, late, by="appended") == {0: event.offset + 3}
                if topic == "raw":
                    assert log.offsets_at(topic, event.appended) == {0: event.offset}

    def test_disorder_is_found_by_the_first_event_that_reaches_a_time(self, log: Log) -> None:
        """Event times rise and fall; nothing at or after a time stands before the offset given for it."""
        log.create_topic("orders", ORDERS, time="at", partitions=1)
        seconds = [5, 3, 9, 1, 9, 12, 7, 20, 2, 30]
        for second in seconds:
            log.append("orders", [order(second), order(second - 1)])
        times = [moment for second in seconds for moment in (second, second - 1)]
        for second in range(32):
            expected = next((at for at, moment in enumerate(times) if moment >= second), len(times))
            assert log.offsets_at("orders", NOON + timedelta(seconds=second)) == {0: expected}

    def test_a_clock_far_ahead_is_not_taken_for_a_time_that_was_reached(self, log: Log) -> None:
        """An event beyond `future_max` does not hide the true place of a time, alone or inside a batch."""
        log.create_topic("orders", ORDERS, time="at", partitions=1, future_max="1 day")
        [now] = [event.appended for event in self._appended_now(log)]
        ahead = {"id": "2099", "at": now + 9000 * DAY}
        log.append("orders", [ahead])
        log.append("orders", [ahead, {"id": "now", "at": now}, ahead])
        log.append("orders", [{"id": "soon", "at": now + timedelta(hours=1)}])
        assert log.offsets_at("orders", now) == {0: 2}
        assert log.offsets_at("orders", now + timedelta(minutes=1)) == {0: 4}
        assert log.offsets_at("orders", now + 2 * DAY) == {0: 5}

    @pytest.mark.parametrize("moment", ["yesterday", "", None, 1.5, [], {}], ids=repr)
    def test_a_time_nobody_can_read_is_refused(self, log: Log, moment: Any) -> None:
        """The error shows how to write one."""
        log.create_topic("raw")
        with refused(InvalidInput):
            log.offsets_at("raw", moment)

    def test_a_kind_of_time_nobody_keeps_is_refused(self, log: Log) -> None:
        """There are two: the event's and the log's."""
        log.create_topic("raw")
        with refused(InvalidInput, "appended"):
            log.offsets_at("raw", NOON, by="moon")  # type: ignore[arg-type]

    def _appended_now(self, log: Log) -> list[Any]:
        """One event whose append time is the log's present."""
        log.create_topic("clock", partitions=1)
        log.append("clock", [b"tick"])
        return events_of(log, "clock")
