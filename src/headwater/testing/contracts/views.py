"""The contract of view stores: what a maintainer and its readers may rely on, whichever database holds the rows.

    class TestMyStore(ViewStoreContract):
        @pytest.fixture
        def store_url(self) -> str: ...

The oracle is a dict of rows by key, changed by a plain loop; it shares no code with what it checks.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.log.log import Log, open_log
from headwater.model.errors import Fenced, InvalidInput, NoAccess, NotFound, SchemaMismatch, TimedOut
from headwater.model.marker import Marker
from headwater.testing.contracts.case import refused
from headwater.views.catalog import plan_view
from headwater.views.changes import Delta, changes_schema
from headwater.views.definition import Mode, ViewDefinition, define_view
from headwater.views.maintainer import Maintained, ViewMaintainer
from headwater.views.store import Applied, Limits, ViewSelection, ViewStore
from headwater.views.store_url import open_view_store
from headwater.views.subscription import Change, Subscription
from headwater.views.view import View

Row = dict[str, Any]

ALL_TYPES = (
    "k STRING, b BOOLEAN, t TINYINT, s SMALLINT, i INT, l BIGINT, f FLOAT, d DOUBLE, n DECIMAL(38, 18), x BINARY, day DATE, "
    "at TIMESTAMP, clock TIMESTAMP_NTZ, many ARRAY<STRING>, pairs MAP<STRING, INT>, "
    "inner STRUCT<a: BIGINT, at: TIMESTAMP, n: DECIMAL(10, 2), x: BINARY>"
)
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
FULL: Row = {
    "k": 'a "quoted", \\ | text\nwith lines ’',
    "b": True,
    "t": -128,
    "s": 32_767,
    "i": -(2**31),
    "l": 2**63 - 1,
    "f": 0.5,
    "d": 0.1,
    "n": Decimal("12345678901234567890.123456789012345678"),
    "x": b"\x00\xff",
    "day": date(1, 1, 1),
    "at": NOON + timedelta(microseconds=1),
    "clock": datetime(9999, 12, 31, 23, 59, 59, 999_999),  # noqa: DTZ001 (TIMESTAMP_NTZ has no zone)
    "many": ["", None, "a,b"],
    "pairs": [("x", 1), ("y", None)],
    "inner": {"a": 1, "at": NOON, "n": Decimal("1.50"), "x": b"\x01"},
}
EDGES: list[Row] = [
    FULL,
    {"k": None},
    {
        "k": "",
        "d": math.inf,
        "f": -math.inf,
        "l": -(2**63),
        "many": [],
        "x": b"",
        "n": Decimal("-0.000000000000000001"),
    },
    {"k": "nan", "d": math.nan, "b": False, "at": datetime(1, 1, 1, tzinfo=UTC), "n": Decimal(0)},
    {"k": "\\N", "d": -0.0, "i": 0},
]
HOSTILE = ['semi;colon', 'quo"te', "ap'ostrophe", "--dash", "select", "100%s %(x)s", "naïve ’"]  # fmt: skip
WRITES = [
    "delete from per_page",
    "insert into per_page values ('x', 1)",
    "update per_page set n = 1",
    "drop table per_page",
    "drop view per_page",
    "select 1; drop view per_page",
    "with gone as (delete from per_page returning *) select * from gone",
    "create table mine (a int)",
    "select * into mine from per_page",
    "pragma writable_schema = 1",
    "attach database '/tmp/other.db' as other",
    "copy per_page to '/tmp/rows'",
    "vacuum",
    "begin",
    "select from from",
    "select nothing from per_page",
    "select * from nowhere",
    "",
]
ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"


class ViewCase:
    """What tests of views share: a log, a store, and a maintainer that counts its batches."""

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        """The store under test, empty."""
        raise NotImplementedError("a store's test class gives `store_url`")

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[Log]:
        """An empty log."""
        with open_log(tmp_path / "log", durability="os") as log:
            yield log

    @pytest.fixture
    def store(self, store_url: str) -> Iterator[ViewStore]:
        """The store."""
        store = open_view_store(store_url)
        yield store
        store.close()


class Feeder:
    """A maintainer, given plain rows batch after batch."""

    def __init__(self, log: Log, store: ViewStore, definition: ViewDefinition, **settings: Any) -> None:
        self.maintainer = ViewMaintainer(log, store, definition, **settings)
        self.epoch = -1

    def give(self, rows: list[Row]) -> Maintained:
        """The next batch."""
        self.epoch += 1
        schema = self.maintainer.definition.schema
        fields = [field.with_nullable(True) for field in schema]
        if any("_deleted" in row for row in rows):
            fields.append(pa.field("_deleted", pa.bool_()))
        table = pa.Table.from_pylist(rows, schema=pa.schema(fields))
        return self.maintainer.maintain(table, Marker(query="q", epoch=self.epoch, ends={"t": self.epoch}))


def pages(**settings: Any) -> ViewDefinition:
    """A small view: a number for each page."""
    return define_view("per_page", "page STRING, n BIGINT", key="page", **settings)


def counts(**numbers: int) -> list[Row]:
    """Rows of `pages`."""
    return [{"page": page, "n": n} for page, n in numbers.items()]


def by_page(view: View) -> dict[Any, Any]:
    """The rows of `pages` as a dict."""
    return {row["page"]: row["n"] for row in view.rows().to_pylist()}


def small_topic(log: Log, definition: ViewDefinition, **settings: Any) -> None:
    """A topic of changes with small segments, so that something can be removed from it."""
    columns = changes_schema(definition)
    log.create_topic(definition.changes, columns, key="key", partitions=1, segment_bytes=4096, **settings)


def drained(feed: Subscription) -> list[Change]:
    """Everything that a subscription has now."""
    found: list[Change] = []
    while more := feed.poll(timeout_s=0):
        found += more
    return found


class ViewStoreContract(ViewCase):
    """The tests of a store."""

    def test_every_type_comes_back_as_it_was(self, log: Log, store: ViewStore) -> None:
        """All types, their extremes, nulls, NaN: what is read equals what was given, and given again it is no change."""
        feeder = Feeder(log, store, define_view("all", ALL_TYPES, key="k"))
        assert feeder.give(EDGES).changes == len(EDGES)
        fields = [field.with_nullable(True) for field in feeder.maintainer.definition.schema]
        given = pa.Table.from_pylist(EDGES, schema=pa.schema(fields))
        read = View(store, "all", log=log).rows()
        assert read.schema == given.schema
        texts = [sorted(map(repr, table.to_pylist())) for table in (read, given)]
        assert texts[0] == [text.replace("-0.0", "0.0") for text in texts[1]] or texts[0] == texts[1]
        assert feeder.give(EDGES).changes == 0
        assert View(store, "all", log=log).get(k=None) == dict.fromkeys(given.schema.names)

    def test_hostile_names_are_only_names(self, log: Log, store: ViewStore) -> None:
        """Columns may be called anything; values are never SQL."""
        schema = pa.schema([pa.field(name, pa.string()) for name in HOSTILE])
        feeder = Feeder(log, store, define_view("hostile-1.view", schema, key=HOSTILE[:2], order=HOSTILE[2]))
        row = dict.fromkeys(HOSTILE, "'); drop table x; --")
        feeder.give([row])
        view = View(store, "hostile-1.view", log=log)
        assert view.get(**{name: row[name] for name in HOSTILE[:2]}) == row
        assert view.rows(dict.fromkeys(HOSTILE, "'); drop table x; --")).to_pylist() == [row]
        assert view.sql('select * from "hostile-1.view"').to_pylist() == [row]
        with refused(InvalidInput, "not a valid SQL condition"):
            view.rows("1 = 1) union select * from x where (1 = 1")
        with refused(InvalidInput, "no column 'drop'"):
            view.rows({"drop": 1})
        with refused(SchemaMismatch, "select"):
            view.rows({"select": 1})

    @pytest.mark.parametrize("mode", ["update", "complete", "append"])
    @pytest.mark.parametrize("seed", range(2))
    def test_random_batches_equal_the_oracle(self, log: Log, store: ViewStore, mode: Mode, seed: int) -> None:
        """Rows, feed and every earlier state, after each of many random batches; the seed is in the test's name."""
        chance = random.Random(f"{mode}{seed}")
        definition = define_view("v", "a STRING, b BIGINT, n DOUBLE, tags ARRAY<STRING>", key=["a", "b"], mode=mode)
        feeder = Feeder(log, store, definition)
        view = View(store, "v", log=log)
        oracle: dict[Any, Row] = {}
        history: list[tuple[str | None, dict[Any, Row]]] = []
        followed: dict[Any, Row] = {}
        with view.subscribe() as feed:
            for _ in range(8):
                rows = _random_rows(chance, mode, oracle)
                feeder.give(rows)
                oracle = _after(oracle, rows, mode)
                _follow(followed, drained(feed))
                assert followed == oracle == _by_key(view.rows())
                history.append((feed.token, dict(oracle)))
        for token, rows_then in history:
            assert _by_key(view.rows(as_of=token)) == rows_then

    def test_a_store_that_lags_or_is_empty_is_brought_up_from_the_log(self, log: Log, store: ViewStore) -> None:
        """Whatever a store lost, the topic of changes has it."""
        definition = pages()
        feeder = Feeder(log, store, definition)
        feeder.give(counts(a=1, b=2))
        feeder.give([{"page": "b", "_deleted": True}, {"page": "c", "n": 3}])
        (stored,) = store.stored()
        for lost in (Applied(), Applied(topic_id=stored.applied.topic_id, positions={0: 2}, epoch=0)):
            none = Delta(store.read("per_page").rows.slice(0, 0), pa.array([], pa.string()))
            found = store.stored()[0].applied
            store.apply(definition, none, before=found, after=lost, clear=lost.topic_id == "")
            ViewMaintainer(log, store, definition)
            assert by_page(View(store, "per_page")) == {"a": 1, "c": 3}
            assert store.stored()[0].applied.positions == {0: 4}
            assert store.stored()[0].applied.epoch == 1

    def test_a_compacted_topic_rebuilds_the_store_too(self, log: Log, store: ViewStore) -> None:
        """Only the last change of each key is left, which is enough."""
        small_topic(log, pages(), compact=True)
        feeder = Feeder(log, store, pages(), compact=True)
        for n in range(40):
            feeder.give([*counts(a=n, b=n), {"page": f"gone{n - 1}", "_deleted": True}, *counts(**{f"gone{n}": n})])
        assert log.tidy("per_page.changes") > 0
        found = store.stored()[0].applied
        empty = Delta(store.read("per_page").rows.slice(0, 0), pa.array([], pa.string()))
        store.apply(pages(), empty, before=found, after=Applied(), clear=True)
        ViewMaintainer(log, store, pages(), compact=True)
        assert by_page(View(store, "per_page")) == {"a": 39, "b": 39, "gone39": 39}

    def test_who_was_overtaken_changes_nothing(self, log: Log, store: ViewStore) -> None:
        """Neither the log nor the store takes a batch from a maintainer that somebody has replaced."""
        slow = Feeder(log, store, pages())
        slow.give(counts(a=1))
        before = store.stored()[0].applied
        quick = Feeder(log, store, pages())
        quick.epoch = slow.epoch
        quick.give(counts(a=2))
        with refused(Fenced):
            slow.give(counts(a=3))
        rows = store.read("per_page").rows
        with refused(Fenced, "Another process maintains"):
            store.apply(pages(), Delta(rows, pa.array(["a"])), before=before, after=before)
        assert by_page(View(store, "per_page")) == {"a": 2}

    def test_a_rebuilt_generation_is_seen_from_one_moment_on(self, log: Log, store: ViewStore) -> None:
        """Readers see the old one until the swap; then the new one, with its own columns; the old table is gone."""
        old = Feeder(log, store, pages())
        old.give(counts(a=1))
        wider = define_view("per_page", "page STRING, n BIGINT, share DOUBLE", key="page")
        plan = plan_view(log, wider)
        assert plan.rebuild and "share DOUBLE" in plan.why and plan.definition.generation == 2
        new = Feeder(log, store, plan.definition)
        new.give([{"page": "a", "n": 1, "share": 1.0}])
        view = View(store, "per_page", log=log)
        old.give(counts(b=2))
        assert by_page(view) == {"a": 1, "b": 2}
        assert plan_view(log, wider).definition.generation == 2, "a build is gone on with"
        with view.subscribe() as feed:
            assert [change.kind for change in drained(feed)] == ["added", "added", "ready"]
            old.give(counts(c=3))
            new.maintainer.swap()
            assert [change.kind for change in drained(feed)] == ["added", "reset", "added", "ready"]
            token = feed.token
        assert view.rows().to_pylist() == [{"page": "a", "n": 1, "share": 1.0}]
        assert view.sql("select share from per_page").to_pylist() == [{"share": 1.0}]
        assert [stored.definition.generation for stored in store.stored()] == [2]
        assert not plan_view(log, wider).rebuild
        with view.subscribe(token) as feed:
            new.give([{"page": "z", "n": 1, "share": 0.5}])
            assert [(change.kind, change.new["page"]) for change in feed.poll() if change.new] == [("added", "z")]

    def test_nobody_who_reads_notices_a_swap(self, log: Log, store: ViewStore) -> None:
        """Rows and keys, read without a pause while generations are swapped: each answer is of one of them, and whole."""
        Feeder(log, store, pages(code="0")).give(counts(a=0, b=0))
        view = View(store, "per_page", log=log)
        stop, failures, turns = threading.Event(), [], [0]

        def read_on() -> None:
            try:
                while not stop.is_set():
                    rows = by_page(view)
                    assert rows["a"] == rows["b"], rows
                    assert (view.get(page="a") or {}).get("n") is not None
                    turns[0] += 1
            except BaseException as error:  # noqa: BLE001 (told to the test's own thread)
                failures.append(error)

        thread = threading.Thread(target=read_on)
        thread.start()
        for n in range(1, 6):
            feeder = Feeder(log, store, plan_view(log, pages(code=f"{n}")).definition)
            feeder.give(counts(a=n, b=n))
            feeder.maintainer.swap()
        stop.set()
        thread.join()
        assert not failures, failures
        assert turns[0] and by_page(view) == {"a": 5, "b": 5}

    def test_rows_are_chosen_ordered_and_limited(self, log: Log, store: ViewStore) -> None:
        """By values (null is one), by an SQL condition, by columns up or down with nulls last."""
        definition = define_view("v", "k STRING, n DECIMAL(10, 2), at TIMESTAMP, d DOUBLE", key="k")
        rows: list[Row] = [
            {"k": "a", "n": Decimal("10.00"), "at": NOON, "d": math.nan},
            {"k": "b", "n": Decimal("9.50"), "at": None, "d": 1.0},
            {"k": "c", "n": None, "at": NOON, "d": None},
            {"k": "d", "n": Decimal("-1.00"), "at": NOON, "d": -math.inf},
        ]
        Feeder(log, store, definition).give(rows)
        view = View(store, "v", log=log)
        late = datetime(2100, 1, 1, tzinfo=UTC)

        def keys(**choice: Any) -> str:
            found = ["".join(view.rows(**choice).column("k").to_pylist())]
            if not isinstance(choice.get("where"), str):
                found.append("".join(view.rows(**choice, as_of=late).column("k").to_pylist()))
            assert len(set(found)) == 1
            return found[0]

        assert keys(order="n") == "dbac"
        assert keys(order="-n") == "abdc"
        assert keys(order=["at", "-k"], limit=2) == "dc"
        assert keys(order="-d") == "abdc"
        assert keys(where={"at": None}, order="k") == "b"
        assert keys(where={"at": NOON, "n": Decimal("10.00")}, order="k") == "a"
        assert keys(where="k in ('a', 'c') and at is not null", order="-k") == "ca"
        with refused(InvalidInput, "limit 0"):
            view.rows(limit=0)
        with refused(InvalidInput, "no column 'nope'"):
            view.rows(order="-nope")

    def test_a_question_changes_nothing(self, log: Log, store: ViewStore) -> None:
        """Whatever is not one SELECT is refused in a sentence."""
        Feeder(log, store, pages()).give(counts(a=1))
        view = View(store, "per_page", log=log)
        for question in WRITES:
            with pytest.raises((InvalidInput, NoAccess)) as caught:
                view.sql(question)
            assert caught.value.advice, question
            assert by_page(view) == {"a": 1}, question

    def test_a_question_is_limited(self, log: Log, store: ViewStore) -> None:
        """In time and in size; afterwards the store answers as before."""
        Feeder(log, store, pages()).give(counts(a=1))
        view = View(store, "per_page", log=log)
        with refused(TimedOut, "took longer"):
            view.sql(ENDLESS, timeout_s=0.2)
        series = ENDLESS.replace("from n)", "from n where i < 200)").replace("max(i)", "i")
        with refused(InvalidInput, "larger than 100 rows"):
            view.sql(series, rows_max=100)
        assert view.sql(series, rows_max=200).num_rows == 200
        with refused(InvalidInput):
            view.sql("select substr(replace(hex(zeroblob(500000000)), '0', 'x'), 1, 500000000) as text")
        assert by_page(view) == {"a": 1}

    def test_a_question_gets_types_back(self, log: Log, store: ViewStore) -> None:
        """Columns keep their types, and a question about the past is asked in the same words."""
        definition = define_view("typed", "k STRING, at TIMESTAMP, n DECIMAL(10, 2), day DATE, b BOOLEAN", key="k")
        feeder = Feeder(log, store, definition)
        row = {"k": "a", "at": NOON, "n": Decimal("1.50"), "day": date(2026, 1, 31), "b": True}
        feeder.give([row])
        view = View(store, "typed", log=log)
        with view.subscribe() as feed:
            feed.poll()
            token = feed.token
        feeder.give([{**row, "n": Decimal("2.50")}, {**row, "k": "b"}])
        question = "select t.*, 1 + 1 as two from typed t where k = 'a'"
        assert view.sql(question).to_pylist() == [{**row, "n": Decimal("2.50"), "two": 2}]
        assert view.sql(question, as_of=token).to_pylist() == [{**row, "two": 2}]
        assert view.sql("select count(*) as c from typed", as_of=token).to_pylist() == [{"c": 1}]
        assert view.sql("select k, n from typed where k = 'nobody'").num_rows == 0

    def test_what_is_not_there_is_said(self, log: Log, store: ViewStore, store_url: str) -> None:
        """Unknown views, generations, keys; writing through a reader."""
        Feeder(log, store, pages()).give(counts(a=1))
        with refused(NotFound, "'other'"):
            store.read("other")
        with refused(NotFound, "generation 7"):
            store.read("per_page", generation=7)
        view = View(store, "per_page", log=log)
        assert view.get(page="nobody") is None
        with refused(InvalidInput, "page", "other"):
            view.get(other=1)
        reader = open_view_store(store_url, read_only=True)
        with refused(NoAccess, "read-only"):
            reader.create(pages())
        assert reader.read("per_page", ViewSelection(limit=1), limits=Limits()).rows.num_rows == 1
        reader.close()


def _random_rows(chance: random.Random, mode: Mode, oracle: dict[Any, Row]) -> list[Row]:
    rows: list[Row] = []
    for _ in range(chance.randrange(8)):
        row: Row = {
            "a": chance.choice(["x", "y", None, "x|y", "\\N"]),
            "b": chance.choice([1, 2, None]),
            "n": chance.choice([0.5, 1.5, None]),
            "tags": chance.choice([None, [], ["a"]]),
        }
        if mode == "update" and chance.random() < 0.3:
            row["_deleted"] = True
        if mode == "append" and (row["a"], row["b"]) in {*oracle, *((r["a"], r["b"]) for r in rows)}:
            continue
        rows.append(row)
    return rows


def _after(oracle: dict[Any, Row], rows: list[Row], mode: Mode) -> dict[Any, Row]:
    """The rule of each mode, as a loop."""
    result = {} if mode == "complete" else dict(oracle)
    for row in rows:
        key = (row["a"], row["b"])
        result.pop(key, None)
        if not row.get("_deleted"):
            result[key] = {name: row[name] for name in ("a", "b", "n", "tags")}
    return result


def _by_key(rows: pa.Table) -> dict[Any, Row]:
    return {(row["a"], row["b"]): row for row in rows.to_pylist()}


def _follow(followed: dict[Any, Row], changes: list[Any]) -> None:
    """What a subscriber does: each change fits what it has."""
    for change in changes:
        if change.old is not None:
            assert followed.pop((change.old["a"], change.old["b"])) == change.old
        if change.new is not None:
            key = (change.new["a"], change.new["b"])
            assert key not in followed
            followed[key] = change.new
