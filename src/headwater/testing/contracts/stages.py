"""The contract of stages: each batch is written exactly once, and by the newest holder only."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.log.clients.stage import Stage
from headwater.log.log import Log
from headwater.model.errors import CheckpointConflict, Fenced, InvalidInput, InvalidName, SchemaMismatch, TopicNotFound
from headwater.model.marker import Marker
from headwater.testing.contracts.case import LogCase, OpenLog, events_of, refused, values_of


def marker(epoch: int, *, query: str = "q", ends: Any = None) -> Marker:
    """The marker of a batch that ends ten events after the one before it."""
    return Marker(query=query, epoch=epoch, ends={"in": {"0": 10 * epoch + 10}} if ends is None else ends)


def rows(*numbers: int) -> list[dict[str, Any]]:
    """Some rows of the topics of these tests."""
    return [{"n": number, "k": f"k{number}"} for number in numbers]


class StageContract(LogCase):
    """What holds for stages."""

    keeps_positions = True
    """Where a batch's events stand is known also when it was written before."""

    @pytest.fixture
    def topics(self, log: Log) -> None:
        """Two topics to write to."""
        log.create_topic("a", "n INT, k STRING", key="k", partitions=3)
        log.create_topic("b", "n INT, k STRING", key="k", partitions=1)

    @pytest.mark.usefixtures("topics")
    def test_a_batch_is_written_once(self, log: Log) -> None:
        """The same marker again writes nothing, and says where the events stand."""
        stage = log.stage("app.s")
        assert stage.last is None
        first = stage.commit(marker(0), [("a", rows(1, 2, 3)), ("b", rows(4))])
        again = stage.commit(marker(0), [("a", rows(1, 2, 3)), ("b", rows(4))])
        assert (first.written, again.written) == (True, False)
        if self.keeps_positions:
            assert first.positions == again.positions
        found = {(event.topic, event.partition, event.offset) for event in events_of(log, ["a", "b"])}
        told = {
            (topic, number, offset)
            for topic, spans in first.positions.items()
            for number, span in spans.items()
            for offset in span
        }
        assert found == told
        assert len(found) == 4
        assert stage.last == Marker(query="q", epoch=0, ends={"in": {"0": 10}}, stage="app.s")

    @pytest.mark.usefixtures("topics")
    def test_epochs_follow_each_other(self, log: Log) -> None:
        """Each is written; a stage may begin with any, and need not append."""
        stage = log.stage("s")
        assert stage.commit(marker(7), [("b", rows(7))]).written
        assert stage.commit(marker(8)).positions == {}
        assert not stage.commit(marker(8)).written
        assert stage.commit(marker(9), [("b", rows(9))]).written
        assert [value["n"] for value in values_of(log, "b")] == [7, 9]

    @pytest.mark.usefixtures("topics")
    @pytest.mark.parametrize(
        ("second", "word"),
        [
            (marker(4, query="other"), "deleted"),
            (marker(5, query="other"), "deleted"),
            (marker(0, query="other"), "deleted"),
            (marker(4, ends={"in": {"0": 51}}), "planned again"),
            (marker(3), "older"),
            (marker(6), "missing"),
        ],
    )
    def test_what_does_not_follow_is_refused(self, log: Log, second: Marker, word: str) -> None:
        """And never passed over: nothing is written, the last marker stays, and the ways out are named."""
        stage = log.stage("s")
        stage.commit(marker(4), [("b", rows(4))])
        with refused(CheckpointConflict, "'s'", "epoch 4", word, "--accept-new-checkpoint STAGE=marker"):
            stage.commit(second, [("b", rows(99))])
        assert stage.last is not None
        assert stage.last.epoch == 4
        assert [value["n"] for value in values_of(log, "b")] == [4]

    @pytest.mark.usefixtures("topics")
    def test_a_new_checkpoint_can_be_accepted(self, log: Log, other: Log) -> None:
        """The last marker is forgotten, and given back: its ends say where to begin."""
        stage = log.stage("s")
        stage.commit(marker(4), [("b", rows(4))])
        forgotten = stage.accept_new_checkpoint()
        assert forgotten is not None
        assert forgotten.ends == {"in": {"0": 50}}
        assert other.store.stage_state("s").last is None
        assert stage.commit(marker(0, query="other"), [("b", rows(0))]).written
        assert [value["n"] for value in values_of(log, "b")] == [4, 0]

    @pytest.mark.usefixtures("topics")
    def test_an_earlier_holder_is_fenced(self, log: Log, other: Log) -> None:
        """From the moment somebody else has opened the stage, whatever it wants to commit."""
        zombie = log.stage("s")
        zombie.commit(marker(0), [("b", rows(0))])
        stage = other.stage("s")
        assert stage.last is not None
        for late in (marker(0), marker(1)):
            with refused(Fenced, "'s'"):
                zombie.commit(late, [("b", rows(1))])
        with refused(Fenced, "'s'"):
            zombie.accept_new_checkpoint()
        assert not stage.commit(marker(0), [("b", rows(0))]).written
        assert stage.commit(marker(1), [("b", rows(1))]).written
        assert [value["n"] for value in values_of(log, "b")] == [0, 1]

    @pytest.mark.usefixtures("topics")
    def test_a_batch_that_is_refused_commits_no_marker(self, log: Log) -> None:
        """All of it or nothing: neither events nor marker, and the batch can be written later."""
        stage = log.stage("s")
        with refused(SchemaMismatch):
            stage.commit(marker(0), [("b", rows(1)), ("a", [{"n": "no number"}])])
        with refused(TopicNotFound, "nowhere"):
            stage.commit(marker(0), [("b", rows(1)), ("nowhere", rows(1))])
        assert stage.last is None
        assert values_of(log, "b") == []
        assert stage.commit(marker(0), [("b", rows(1))]).written

    @pytest.mark.usefixtures("topics")
    def test_stages_do_not_meet(self, log: Log, other: Log) -> None:
        """Each has markers and numbers of its own, also where they write to one topic."""
        assert log.stages() == []
        one, two = log.stage("one"), other.stage("two")
        for epoch in range(3):
            assert one.commit(marker(epoch), [("b", rows(epoch))]).written
            assert two.commit(marker(epoch), [("b", rows(10 + epoch))]).written
        assert [value["n"] for value in values_of(log, "b")] == [0, 10, 1, 11, 2, 12]
        assert log.stages() == ["one", "two"]

    @pytest.mark.usefixtures("topics")
    def test_epochs_may_be_left_out_where_that_is_said(self, log: Log) -> None:
        """By a task that has nothing to write in each batch; everything else stays refused."""
        stage = Stage(log.appender, "s", gaps=True)
        assert stage.commit(marker(2), [("b", rows(2))]).written
        assert stage.commit(marker(5), [("b", rows(5))]).written
        assert not stage.commit(marker(5), [("b", rows(5))]).written
        with refused(CheckpointConflict, "older"):
            stage.commit(marker(4), [("b", rows(4))])
        assert [value["n"] for value in values_of(log, "b")] == [2, 5]

    def test_markers_of_any_size(self, open_log: OpenLog) -> None:
        """A query may read thousands of partitions; another handle sees the same."""
        ends = {f"topic-{number}": {str(part): 10**15 + part for part in range(64)} for number in range(200)}
        with open_log() as log, open_log() as other:
            stage = log.stage("s")
            for epoch in range(3):
                assert stage.commit(Marker(query="q", epoch=epoch, ends=ends if epoch else {})).written
            assert other.store.stage_state("s").last == Marker(query="q", epoch=2, ends=ends, stage="s")
            assert not other.stage("s").commit(Marker(query="q", epoch=2, ends=ends)).written

    def test_ends_are_compared_as_json(self, log: Log) -> None:
        """Partitions as numbers or as text, in any order."""
        stage = log.stage("s")
        assert stage.commit(Marker(query="q", epoch=0, ends={"t": {1: 5, 0: 6}})).written
        assert not stage.commit(Marker(query="q", epoch=0, ends={"t": {"0": 6, "1": 5}})).written

    def test_what_is_no_marker_is_refused(self, log: Log) -> None:
        """Before anything is written."""
        with refused(InvalidInput, "epoch"):
            Marker(query="q", epoch=-1)
        with refused(InvalidInput, "JSON"):
            Marker(query="q", epoch=0, ends={"t": object()})
        with refused(InvalidName, "a/b"):
            log.stage("a/b")
