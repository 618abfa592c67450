"""`headwater views …` at a terminal and in a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headwater as hw
from headwater.testing.contracts.views import Feeder
from headwater.views.definition import define_view
from headwater.views.store_url import open_view_store
from tests.rigs.commands import Command, refused

VIEW = define_view("per_page", "page STRING, day DATE, n BIGINT", key=["page", "day"], order="-n", limit=2)


@pytest.fixture
def feeder(tmp_path: Path) -> Feeder:
    log = hw.open_log(tmp_path / "data", durability="os")
    return Feeder(log, open_view_store(f"sqlite:///{tmp_path}/data/views.db"), VIEW)


def test_views_are_listed_and_shown(command: Command, feeder: Feeder) -> None:
    """With their key, their generation, and how far the store is."""
    feeder.give([{"page": "/", "n": 1}])
    assert "per_page" in command("views", "list").out
    (listed,) = json.loads(command("views", "list", "--json").out)
    assert (listed["view"], listed["key"], listed["changes"]) == ("per_page", ["page", "day"], 1)
    shown = command("views", "show", "per_page")
    assert "0 changes behind" in shown.out and "page STRING, day DATE, n BIGINT" in shown.out
    assert json.loads(command("views", "show", "per_page", "--json").out)["epoch"] == 0


def test_a_view_is_asked(command: Command, feeder: Feeder) -> None:
    """By key and in SQL, now and as it was."""
    feeder.give([{"page": "/", "day": None, "n": 1}, {"page": "/b", "day": None, "n": 2}])
    assert command("views", "get", "per_page", "page=/", "day=null").rows == [{"page": "/", "day": None, "n": 1}]
    assert command("views", "sql", "select sum(n) as s from per_page").rows == [{"s": 3}]
    assert "s" in command("views", "sql", "select sum(n) as s from per_page", "--format", "table").out
    assert command("views", "sql", "select n from per_page order by n", "--format", "csv").out == "n\n1\n2\n"
    asked = ("views", "sql", "select n from per_page", "--view", "per_page", "--as-of", "2020-01-01")
    assert command(*asked).rows == []


def test_a_view_is_watched(command: Command, feeder: Feeder) -> None:
    """Rows, then changes, one JSON object on a line; the token goes on."""
    feeder.give([{"page": "/", "n": 1}])
    first = command("views", "watch", "per_page", "--changes-max", 2).rows
    assert [row["kind"] for row in first] == ["added", "ready"]
    feeder.give([{"page": "/", "n": 5}])
    (change,) = command("views", "watch", "per_page", "--since", first[1]["token"], "--changes-max", 1).rows
    assert (change["kind"], change["old"]["n"], change["new"]["n"]) == ("changed", 1, 5)


def test_mistakes_are_told(command: Command, feeder: Feeder) -> None:
    """What is not there, what is no key, and what would write."""
    feeder.give([{"page": "/", "n": 1}])
    refused(command("views", "show", "nobody"), "not_found", "nobody", "per_page")
    refused(command("views", "get", "per_page", "page=/"), "invalid_input", "page, day")
    refused(command("views", "get", "per_page", "page"), "invalid_input", "COLUMN=VALUE")
    refused(command("views", "get", "per_page", "page=/", "day=soon"), "invalid_input", "soon")
    refused(command("views", "get", "per_page", "page=nope", "day=null"), "not_found", "nope")
    refused(command("views", "sql", "delete from per_page"), "invalid_input", "SELECT")
    refused(command("views", "sql", "select 1", "--as-of", "2020-01-01"), "invalid_input", "--view")
    refused(command("views", "list", "--log", "nowhere"), "log_not_found")
    refused(command("views", "sql", "select 1", "--log", "kafka://x:1"), "invalid_input", "--store")
