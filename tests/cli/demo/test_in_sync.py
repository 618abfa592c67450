"""The example `in_sync`: programs that write twice drift apart; what follows the log does not, and a difference would be found."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headwater.app.app import load_app
from headwater.testing.servers.debian import RedisServer

EXAMPLE = Path(__file__).parents[3] / "examples" / "in_sync"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Modules of the example are found by their own names, as they are where it runs, and it works in a folder of its own."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def module(name: str) -> ModuleType:
    return import_module(name)


@pytest.mark.slow
@pytest.mark.covers("concept: dual write")
def test_only_what_follows_the_log_stays_in_sync(example: Path) -> None:
    """At every look: lost and overtaken writes add up on one side, and there is nothing to lose or overtake on the other."""
    lost = overtaken = 0
    with closing(module("dual_writes").Caches(example, seed=3).run(looks=80, pause_s=0.5)) as looks:
        for failed, raced, derived in looks:
            assert derived == 0
            lost, overtaken = max(lost, failed), max(overtaken, raced)
            if lost and overtaken:
                return
    raise AssertionError(
        f"programs that write twice never drifted apart in both ways: {lost} lost, {overtaken} overtaken"
    )


def test_without_a_redis_clients_write_to_a_file(example: Path) -> None:
    """It is compared as a Redis is: what they did not write there is found."""
    clients, drift = module("clients"), module("drift")
    shop = clients.Shop("sqlite:///./shop.db")
    shop.make()
    found, writing = drift.Drift(shop, ""), clients.Clients(shop, drift.put_into(""))
    lamp = {"product_id": 1, "name": "red lamp 1", "category": "lamps", "price": 5}
    shop.put(1, lamp)
    writing.put(1, lamp)
    shop.put(2, {**lamp, "product_id": 2})
    found.look(writing, at_derived=False)
    assert (found.lost, found.overtaken) == (0, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.service("redis")
def test_every_derived_system_equals_the_database(
    example: Path, redis_server: RedisServer, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While clients write and at the end, by `verify` and by each system's own client; a row that is changed by hand is found."""
    clients, drift = module("clients"), module("drift")
    cache = f"redis://127.0.0.1:{redis_server.port}/3"
    monkeypatch.setenv("SHOP", "sqlite:///./shop.db")
    monkeypatch.setenv("CACHE", cache)
    shop = clients.Shop("sqlite:///./shop.db")
    shop.make()
    app = load_app(EXAMPLE / "app.py")
    app._given_spark = spark  # the session of all tests
    writing = clients.Clients(shop, drift.put_into(cache))
    found = drift.Drift(shop, cache)
    writing.start()
    try:
        app.start()
        wait_for_first_batches(app)
        found.look(writing)
        deadline = time.monotonic() + 60
        while not (found.lost and found.overtaken) and time.monotonic() < deadline:
            time.sleep(0.5)
            found.look(writing, at_derived=False)
        assert found.lost and found.overtaken, "both failures of writing twice are seen, and counted"
        writing.stop()
        found.look(writing)
        assert found.is_none, {copy.name: copy.drifts for copy in found.derived}
        check_plainly(app, example, redis_server.port)
        change_by_hand(redis_server.port)
        for copy in found.derived:
            copy._settle_s = 1.0
        found.look(writing)
        assert [copy.drifts[-1] for copy in found.derived] == [1, 0, 0, 0] and not found.is_none
    finally:
        writing.stop()
        app.stop()


def wait_for_first_batches(app: Any) -> None:
    deadline = time.monotonic() + 120
    while not all(stage.epoch >= 0 for stage in app.status().stages if stage.kind != "capture"):
        assert time.monotonic() < deadline, app.status()
        time.sleep(0.1)


def check_plainly(app: Any, folder: Path, port: int) -> None:
    """The oracle: each system read by its own client, beside the database."""
    import deltalake
    import redis
    import tantivy

    with closing(sqlite3.connect(folder / "shop.db")) as shop:
        truth = {row[0]: row for row in shop.execute("select product_id, name, category, price from products")}
        sums = set(shop.execute("select category, count(*), sum(price) from products group by 1"))
    columns = ("product_id", "name", "category", "price")

    def rows(found: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
        assert len({row["product_id"] for row in found}) == len(found)
        return {row["product_id"]: tuple(row[name] for name in columns) for row in found}

    assert len(truth) > 10
    with redis.Redis("127.0.0.1", port, 3) as client:
        assert rows([json.loads(client.get(name)) for name in client.scan_iter("products:*")]) == truth
    searcher = tantivy.Index.open(str(folder / "search")).searcher()
    hits = [
        json.loads(bytes(searcher.doc(hit)["_row"][0]))
        for _, hit in searcher.search(tantivy.Query.all_query(), 99_999).hits
    ]
    assert rows([hit for hit in hits if "product_id" in hit]) == truth
    table = deltalake.DeltaTable(str(folder / "warehouse" / "products"))
    assert table.metadata().partition_columns == ["category"]
    assert rows(table.to_pyarrow_table().to_pylist()) == truth
    view = app.views["per_category"].rows().to_pylist()
    assert {(row["category"], row["products"], row["value"]) for row in view} == sums


def change_by_hand(port: int) -> None:
    import redis

    with redis.Redis("127.0.0.1", port, 3) as client:
        name = next(client.scan_iter("products:*"))
        client.set(name, json.dumps({**json.loads(client.get(name)), "price": -1}))
