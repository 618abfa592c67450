"""The graph of an application: what is refused before Spark starts, and how it is drawn."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import headwater as hw
from headwater.model.errors import InvalidApp, InvalidName

SCHEMA = "user_id BIGINT, page STRING, at TIMESTAMP"


def identity(frame: Any) -> Any:
    return frame


def made(name: str) -> Any:
    def function(frame: Any) -> Any:
        return frame

    function.__name__ = name
    return function


@pytest.fixture
def app(tmp_path: Any) -> hw.App:
    return hw.App("shop", log=tmp_path / "log")


def test_declaring_changes_nothing_and_gives_the_function_back(app: hw.App, tmp_path: Any) -> None:
    clicks = app.topic("clicks", schema=SCHEMA, key="user_id", time="at")
    assert app.stream(clicks, to="copy")(identity) is identity
    assert app.view("copy", key="page")(made("per_page")).__name__ == "per_page"
    assert not (tmp_path / "log").exists()
    assert [stage.name for stage in app.graph.order()] == ["identity", "per_page"]
    assert list(app.views) == ["per_page"]


def test_stages_stand_after_those_whose_results_they_read(app: hw.App) -> None:
    """Whatever the order of declaration."""
    app.topic("a", schema=SCHEMA)
    app.stream("c", to="d")(made("third"))
    app.stream("b", to="c")(made("second"))
    app.stream("a", to="b")(made("first"))
    assert [stage.name for stage in app.graph.order()] == ["first", "second", "third"]


def test_a_cycle_is_refused_and_shown(app: hw.App) -> None:
    app.topic("a", schema=SCHEMA)
    app.stream("a", "c", to="b")(made("first"))
    app.stream("b", to="c")(made("second"))
    with pytest.raises(InvalidApp, match="first → second → first"):
        app.graph.order()


def test_an_input_that_is_named_twice_is_refused(app: hw.App) -> None:
    """Also by another name for it: a function gets one DataFrame for each topic."""
    clicks = app.topic("clicks", schema=SCHEMA)
    for again in (clicks, "clicks"):
        with pytest.raises(InvalidApp, match=r"Stage 'pairs' \(test_graph.py:\d+\) reads topic 'clicks' twice.*alias"):
            app.stream(clicks, again, to="pairs")(made("pairs"))
    assert not app.graph.stages


def test_inputs_that_nobody_has_are_refused_by_name_and_line(app: hw.App) -> None:
    app.topic("clicks", schema=SCHEMA)
    app.stream("cliks", to="copy")(identity)
    with pytest.raises(InvalidApp, match=r"'identity' \(test_graph.py:\d+\) reads topic 'cliks'.*clicks"):
        app.graph.check(in_log=[])
    app.graph.check(in_log=["cliks"])


@pytest.mark.parametrize("second", ["copy", "clicks"])
def test_a_topic_has_one_writer(app: hw.App, second: str) -> None:
    app.topic("clicks", schema=SCHEMA)
    app.stream("clicks", to="copy")(made("one"))
    with pytest.raises(InvalidApp, match="another name"):
        app.stream("clicks", to=second)(made("two"))


def test_a_stage_has_a_name_of_its_own(app: hw.App) -> None:
    app.topic("clicks", schema=SCHEMA)
    app.stream("clicks", to="copy")(identity)
    with pytest.raises(InvalidApp, match="there is a stage 'identity' already"):
        app.stream("clicks", to="other")(identity)


def test_what_is_no_input_is_refused(app: hw.App, tmp_path: Any) -> None:
    other = hw.App("other", log=tmp_path / "log").topic("clicks", schema=SCHEMA)
    with pytest.raises(InvalidApp, match="another application"):
        app.stream(other, to="copy")(identity)
    with pytest.raises(InvalidApp, match="is not an input"):
        app.stream(7, to="copy")(identity)  # type: ignore[arg-type]
    with pytest.raises(InvalidApp, match="has no inputs"):
        app.stream(to="copy")(identity)
    with pytest.raises(InvalidApp, match="has no stages"):
        app.graph.check(in_log=[])


@pytest.mark.parametrize("name", ["../up", "", "a b", "x" * 300])
def test_hostile_names_are_refused(app: hw.App, name: str) -> None:
    with pytest.raises(InvalidName):
        hw.App(name)
    with pytest.raises(InvalidName):
        app.topic(name, schema=SCHEMA)


def test_a_trigger_is_a_duration(app: hw.App) -> None:
    app.topic("clicks", schema=SCHEMA)
    with pytest.raises(InvalidApp, match="trigger='soon' is not a duration"):
        app.stream("clicks", to="copy", trigger="soon")(identity)


def test_durations_may_be_timedeltas(app: hw.App) -> None:
    """As everywhere; one that is none is refused where it is given."""
    minute = timedelta(minutes=1)
    app.topic("clicks", schema=SCHEMA, lateness=minute, retention=None)
    app.stream("clicks", to="copy", lateness=minute, trigger=minute / 60, late="correct", corrections=minute)(identity)
    stage = app.graph.stages["identity"]
    assert (stage.trigger, stage.corrections_us) == (timedelta(seconds=1), 60_000_000)
    with pytest.raises(InvalidApp, match=r"test_graph.py:\d+: lateness: 'soon' is not a duration"):
        app.topic("orders", schema=SCHEMA, lateness="soon")


def test_a_table_needs_a_key(app: hw.App) -> None:
    with pytest.raises(InvalidApp, match="has no key"):
        app.table("users", schema=SCHEMA)


def test_the_graph_is_drawn_from_its_sources_down(app: hw.App) -> None:
    clicks = app.topic("clicks", schema=SCHEMA, key="user_id", time="at")
    app.stream(clicks, to="visits")(made("visits"))
    app.view("visits", key="page")(made("per_page"))
    app.sink("visits", to="./warehouse/visits")
    assert app.graph.draw({"visits": ["keeps no state"]}).splitlines() == [
        "clicks (key user_id, time at)",
        "└─ visits → topic visits",
        "     keeps no state",
        "   ├─ per_page → view, key (page), update",
        "   └─ visits.sink → sink ./warehouse/visits",
    ]
