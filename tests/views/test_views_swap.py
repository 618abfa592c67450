"""What reads a view's topic follows the view from one generation to the next: its changes add up to the view, whoever dies on the way.

The oracle is a reader that knows nothing of generations: it takes the events of `<view>.changes` one by one, and keeps a dict of rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.log.log import Log, open_log
from headwater.model.errors import Fenced
from headwater.model.schema import to_ddl
from headwater.testing.contracts.views import Feeder, counts, drained, pages
from headwater.testing.crash.points import kill_at
from headwater.verify.log_sides import open_log_side
from headwater.views.catalog import CatalogEntry, ViewCatalog, plan_view
from headwater.views.definition import ViewDefinition, define_view
from headwater.views.store import ViewStore
from headwater.views.store_url import open_view_store
from headwater.views.view import View
from tests.rigs.children import Child

STEPS = [
    "views: old generation fenced",
    "views: difference known",
    "views: swapped in the log",
    "views: swapped in the store",
]
GENERATIONS = 5
Row = dict[str, Any]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log", durability="os") as log:
        yield log


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ViewStore]:
    store = open_view_store(f"sqlite:///{tmp_path}/views.db")
    yield store
    store.close()


def followed(log: Log, name: str = "per_page") -> list[Row]:
    """The rows that a reader has who takes every change in order; each change must begin with the row that the last one left."""
    rows: dict[str, Row] = {}
    for event in log.read(f"{name}.changes").to_pylist():
        old, new = event["old"], event["new"]
        known = rows.pop(event["key"], None)
        assert known == (old and {**dict.fromkeys(known or {}), **old}), event
        assert (old is None, new is None) == {
            "insert": (True, False),
            "update": (False, False),
            "delete": (False, True),
        }[event["op"]]
        if new is not None:
            rows[event["key"]] = new
    return sorted(rows.values(), key=repr)


def shown(log: Log, store: ViewStore, name: str = "per_page") -> list[Row]:
    """The rows of the view, with null in columns that only earlier generations had, as the topic has them."""
    columns = [field.name for field in log.topic(f"{name}.changes").schema.field("new").type]
    rows = View(store, name, log=log).rows().to_pylist()
    return sorted(({column: row.get(column) for column in columns} for row in rows), key=repr)


def next_generation(log: Log, store: ViewStore, definition: ViewDefinition, **settings: Any) -> Feeder:
    plan = plan_view(log, definition)
    assert plan.rebuild
    return Feeder(log, store, plan.definition, **settings)


def test_a_reader_gets_what_the_new_code_changed(log: Log, store: ViewStore) -> None:
    """Rows that are gone are deleted, rows that differ updated, new ones inserted, equal ones left alone; then come the new batches."""
    Feeder(log, store, pages()).give(counts(same=1, differs=2, gone=3))
    new = next_generation(log, store, pages(code="other"))
    new.give(counts(same=1, differs=20, new=4))
    before = log.offsets("per_page.changes")[0].stop
    new.maintainer.swap()
    told = log.read("per_page.changes", start={0: before}).to_pylist()
    assert [(event["op"], event["key"]) for event in told] == [
        ("delete", "gone"),
        ("update", "differs"),
        ("insert", "new"),
    ]
    assert followed(log) == shown(log, store)
    new.give([{"page": "same", "_deleted": True}, *counts(new=5)])
    assert followed(log) == shown(log, store) == sorted(counts(differs=20, new=5), key=repr)
    again = Feeder(log, store, plan_view(log, pages(code="other")).definition)
    assert not again.maintainer.apart
    assert followed(log) == shown(log, store)


def test_the_old_generation_is_not_gone_on_with(log: Log, store: ViewStore) -> None:
    """Whoever still maintains it is refused: its changes would be taken for those of the view."""
    old = Feeder(log, store, pages())
    old.give(counts(a=1))
    new = next_generation(log, store, pages(code="other"))
    new.give(counts(a=2))
    old.give(counts(late=1))
    new.maintainer.swap()
    assert followed(log) == shown(log, store) == counts(a=2)
    with pytest.raises(Fenced):
        old.give(counts(a=3))
    assert followed(log) == shown(log, store) == counts(a=2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("page STRING, n BIGINT", "page STRING, n BIGINT, share DOUBLE", id="column added"),
        pytest.param("page STRING, n BIGINT, share DOUBLE", "page STRING, n BIGINT", id="column removed"),
        pytest.param("page STRING, n INT", "page STRING, n BIGINT", id="wider type"),
        pytest.param("page STRING, n BIGINT", "page STRING, n INT", id="narrower type"),
        pytest.param("page STRING, n BIGINT", "n BIGINT, page STRING", id="other order"),
    ],
)
def test_other_columns_are_followed(log: Log, store: ViewStore, before: str, after: str) -> None:
    """The topic has the columns of all generations; those that a generation has not are null in its rows."""
    Feeder(log, store, define_view("per_page", before, key="page")).give(counts(a=1, b=2))
    new = next_generation(log, store, define_view("per_page", after, key="page"))
    new.give([{"page": "a", "n": 1, **({"share": 0.5} if "share" in after else {})}])
    new.maintainer.swap()
    new.give(counts(c=3))
    assert followed(log) == shown(log, store)
    assert [row["page"] for row in followed(log)] == ["a", "c"] and not new.maintainer.apart


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({}, {}, id="rows without a key"),
        pytest.param({"key": "page"}, {"key": "user"}, id="another key"),
        pytest.param({"key": "page"}, {"key": ("page", "user")}, id="a longer key"),
    ],
)
def test_a_row_is_not_taken_for_another_one_whose_key_reads_alike(
    log: Log, store: ViewStore, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """A reader that keeps rows by columns of its own choice is right, too: all deletions come before all insertions."""

    def definition(code: str, key: dict[str, Any]) -> ViewDefinition:
        mode: Any = "update" if key else "append"
        return define_view("visits", "page STRING, user STRING", mode=mode, code=code, **key)

    Feeder(log, store, definition("1", before)).give([{"page": p, "user": u} for p, u in ("ax", "by", "cz")])
    new = next_generation(log, store, definition("2", after))
    new.give([{"page": p, "user": u} for p, u in ("ya", "ax", "dz")])
    new.maintainer.swap()
    new.give([{"page": "e", "user": "e"}])
    assert followed(log, "visits") == shown(log, store, "visits")
    by_user: dict[str, Row] = {}
    for event in log.read("visits.changes").to_pylist():
        row = event["new"] or event["old"]
        by_user.pop(row["user"], None)
        if event["new"] is not None:
            by_user[row["user"]] = row
    assert sorted(by_user.values(), key=repr) == shown(log, store, "visits")


def test_columns_that_do_not_fit_leave_the_topic_where_it_is(log: Log, store: ViewStore) -> None:
    """The view itself is swapped; that its topic stays behind is said. A generation that fits again is followed again."""
    Feeder(log, store, pages()).give(counts(a=1, b=2))
    text = next_generation(log, store, define_view("per_page", "page STRING, n STRING", key="page"))
    assert "n" in text.maintainer.apart and "STRING" in text.maintainer.apart
    text.give([{"page": "a", "n": "one"}])
    text.maintainer.swap()
    assert View(store, "per_page", log=log).rows().to_pylist() == [{"page": "a", "n": "one"}]
    assert followed(log) == counts(a=1, b=2)
    assert open_log_side(f"{log.url}#per_page").topic == "per_page.changes.2"
    fits = next_generation(log, store, pages(code="back"))
    fits.give(counts(b=3))
    fits.maintainer.swap()
    assert followed(log) == shown(log, store) == counts(b=3)
    assert open_log_side(f"{log.url}#per_page").topic == "per_page.changes"


def test_a_swap_of_an_earlier_version_is_made_up_for(log: Log, store: ViewStore) -> None:
    """Logs in which readers stayed with the first generation: whoever maintains the view next gives them what they lack."""
    Feeder(log, store, pages()).give(counts(a=1, b=2))
    for code in ("two", "three"):
        plan = plan_view(log, pages(code=code))
        Feeder(log, store, plan.definition).give(counts(b=2, c=len(code)))
        generation = plan.definition.generation
        ViewCatalog(log).put(
            "per_page", CatalogEntry(generation, None, {generation: plan.definition})
        )  # as it was done then
        store.show("per_page", generation)
    assert followed(log) == counts(a=1, b=2)
    plan = plan_view(log, pages(code="three"))
    assert (plan.rebuild, plan.definition.generation) == (False, 3)
    for _ in range(2):
        Feeder(log, store, plan.definition)
        assert followed(log) == shown(log, store) == counts(b=2, c=5)


def test_a_compacted_topic_is_followed_too(log: Log, store: ViewStore) -> None:
    """Deletions of the difference are tombstones."""
    Feeder(log, store, pages(), compact=True).give(counts(a=1, b=2))
    new = next_generation(log, store, pages(code="other"), compact=True)
    new.give(counts(b=3))
    new.maintainer.swap()
    new.give(counts(c=4))
    assert [row["new"]["page"] for row in log.table("per_page.changes").to_pylist()] == ["b", "c"]


def test_a_difference_that_a_subscriber_meets_is_a_reset(log: Log, store: ViewStore) -> None:
    """It is told the last changes of its generation, and then the rows of the next one: none of them twice."""
    old = Feeder(log, store, pages())
    old.give(counts(a=1))
    view = View(store, "per_page", log=log)
    new = next_generation(log, store, pages(code="other"))
    new.give(counts(b=2))
    with view.subscribe() as feed:
        assert [change.kind for change in drained(feed)] == ["added", "ready"]
        old.give(counts(c=3))
        new.maintainer.swap()
        new.give(counts(d=4))
        told = [(change.kind, (change.new or {}).get("page")) for change in drained(feed)]
        assert told == [("added", "c"), ("reset", None), ("added", "b"), ("added", "d"), ("ready", None)]
        token = feed.token
        new.give(counts(e=5))
        assert [change.new for change in drained(feed)] == counts(e=5)
    with view.subscribe(token) as feed:
        assert [change.new for change in drained(feed)] == counts(e=5)


def random_rows(chance: random.Random) -> list[Row]:
    pages = chance.sample("abcdefghij", chance.randrange(11))
    return [{"page": page, "n": chance.randrange(3), "_deleted": chance.random() < 0.2} for page in pages]


def run_generations(folder: Path, seed: int, *, die_at: str = "", die_on: int = 0) -> None:
    """Several generations, from where an earlier process was killed; dies at a step for the n-th time."""
    kill_at(die_at, die_on)
    with open_log(folder / "log", durability="os") as log:
        store = open_view_store(f"sqlite:///{folder}/views.db")
        entry = ViewCatalog(log).find("per_page")
        for number in range(0 if entry is None else int(entry.definition.fingerprint), GENERATIONS):
            run_generation(log, store, number, seed)
            assert followed(log) == shown(log, store), (seed, number)
        store.close()


def run_generation(log: Log, store: ViewStore, number: int, seed: int) -> None:
    """The batches of one generation, from the last one that is known on; it is swapped in after two of them."""
    plan = plan_view(log, msgspec.structs.replace(pages(), fingerprint=str(number)))
    feeder = Feeder(log, store, plan.definition)
    last = log.store.stage_state(stage_name(plan.definition)).last
    chance = random.Random(f"{seed}.{number}")
    for epoch, rows in enumerate([random_rows(chance) for _ in range(4)]):
        if epoch >= (0 if last is None else last.epoch):
            feeder.epoch = epoch - 1
            feeder.give(rows)
        if epoch == 1:
            feeder.maintainer.swap()


def stage_name(definition: ViewDefinition) -> str:
    return f"views.per_page{'' if definition.generation == 1 else f'.{definition.generation}'}"


@pytest.mark.parametrize("seed", range(3))
def test_random_generations_add_up(tmp_path: Path, seed: int) -> None:
    """After each of them a reader of the topic has the view's rows."""
    run_generations(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("step", [*STEPS, "views: changes appended", "views: changes known", "views: topic made"])
def test_a_swap_killed_at_a_step_is_ended_by_the_next_process(tmp_path: Path, step: str) -> None:
    """Killed at the first, second and third time; whoever comes next ends it, and readers get each difference once."""
    for die_on in (1, 2, 3):
        child = Child(lambda die_on=die_on: run_generations(tmp_path, 7, die_at=step, die_on=die_on))  # type: ignore[misc]
        assert child.was_killed() or step in STEPS
    Child(lambda: run_generations(tmp_path, 7)).result()
    with open_log(tmp_path / "log") as log:
        store = open_view_store(f"sqlite:///{tmp_path}/views.db")
        assert ViewCatalog(log).get("per_page").definition.fingerprint == "4"
        assert followed(log) == shown(log, store)
        assert to_ddl(log.topic("per_page.changes").schema) == to_ddl(log.topic("per_page.changes.5").schema)
        store.close()
