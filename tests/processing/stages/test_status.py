"""The status of a stage: every event is given, late or dead, and a stage that leaves out many as late says so."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.processing.checkpoint.offsets import EVENTS
from headwater.processing.stages.status import LATE_ROWS, LATE_TAKEN, LateCount, StageStatus, late_notes


def stage(**known: Any) -> StageStatus:
    return StageStatus(**{"name": "windows", "kind": "stream", "to": "windows", "inputs": ["bids"], **known})


def batch(epoch: int, start: int, end: int, **more: Any) -> dict[str, Any]:
    """The progress of a batch that has read one partition."""
    source = {"startOffset": {"bids": {"0": start}}, "endOffset": {"bids": {"0": end}}, "numInputRows": end - start}
    return {"batchId": epoch, "durationMs": {"addBatch": 1}, "sources": [source], **more}


def test_every_event_is_given_or_late_or_dead() -> None:
    """Whoever counts what is late: those who read it, Spark by what it observes, or Spark by what it drops."""
    status = stage()
    status.follow(batch(0, 0, 10), late_in=lambda _: LateCount(left_out=3, taken=1))
    assert (status.events, status.given, status.late, status.late_taken) == (10, 7, 4, 1)
    observed = {f"{LATE_ROWS} 0": {"rows": 2}, f"{LATE_TAKEN} 1": {"rows": 5}}
    dropped = [{"numRowsTotal": 8, "numRowsDroppedByWatermark": 1}]
    assert status.follow(batch(1, 10, 20, observedMetrics=observed, stateOperators=dropped))
    assert (status.given, status.late, status.late_taken) == (14, 12, 6)
    assert not status.follow(batch(1, 10, 20)), "what was told of once is no news"
    status.bury(2)
    assert (status.given, status.dead) == (12, 2)
    assert status.is_whole


@pytest.mark.parametrize("are_all", [True, False])
def test_events_that_were_set_aside_are_among_those_that_were_read(are_all: bool) -> None:
    """Spark does not see them, but a source that counts events itself does."""
    status, progress = stage(), batch(0, 0, 10)
    progress["sources"][0]["numInputRows"] = 9
    if are_all:
        progress["sources"][0]["endOffset"][EVENTS] = 10
    status.dead += 1
    status.follow(progress, skipped=1)
    assert (status.events, status.given, status.dead) == (10, 9, 1)
    assert status.is_whole


def test_a_row_that_only_tells_the_time_is_no_event() -> None:
    status, progress = stage(), batch(0, 10, 10)
    progress["sources"][0]["numInputRows"] = 1
    status.follow(progress)
    assert (status.epoch, status.events, status.given) == (0, 0, 0)


def test_a_stage_that_leaves_out_many_as_late_says_so() -> None:
    """With the likely cause: the stage before it, or whoever appends to the topic. A few, or a small part, are no news."""
    assert late_notes([stage(events=1000, late=99), stage(events=100_000, late=900)]) == []
    assert late_notes([stage(events=3000, late=2900, late_taken=2850)]) == []
    [note] = late_notes([stage(events=3000, late=2951)])
    assert "'windows' has left out 2,951 of 3,000 events as late (98%)" in note and "clock" in note
    before = stage(name="once", to="bids", inputs=["raw"])
    [note] = late_notes([before, stage(events=3000, late=300)])
    assert "(10%)" in note and "stage 'once' writes" in note and "lateness=" in note
