"""Partitioned files for the warehouse: a folder for each value, as Hive, Spark and DuckDB read them; each batch once, whoever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import headwater as hw
from headwater.model.errors import InvalidApp, InvalidInput
from headwater.model.marker import Marker
from headwater.sinks.files import FileSink
from headwater.sinks.sink import open_sink
from headwater.testing.crash.points import kill_at
from tests.rigs.app.sink_targets import SHAPE, batch, delta_rows, folded, write
from tests.rigs.children import in_child
from tests.sinks.test_zombie_files import STEPS

DAYS, BATCHES = ("2026-01-30", "2026-01-31"), 6


def add_all(folder: Path, step: str = "", nth: int = 0) -> None:
    """As Spark does: two files for each day, and the last batch is always tried again."""
    kill_at(step, nth)
    sink = FileSink(f"{folder}/out?partition_by=day,n%2Fa", stage="app.files")
    last = sink.last
    for epoch in range(0 if last is None else last.epoch, BATCHES):
        marker = Marker(query="a query", epoch=epoch, ends=epoch)
        staged = sink.begin(marker)
        if staged is None:
            continue
        for day in DAYS:
            for number in range(2):
                place = staged / f"day={day}" / f"n%2Fa={number}"
                place.mkdir(parents=True)
                pq.write_table(pa.table({"epoch": [epoch] * 5, "row": range(5)}), place / "part")
        (staged / "_SUCCESS").touch()
        sink.commit(marker, staged)


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_of_partitions_killed_at_a_step_is_gone_on_with(tmp_path: Path, step: str) -> None:
    """Every row of every batch is there once, under its day."""
    for nth in (1, 3):
        with pytest.raises(AssertionError, match="SIGKILL"):
            in_child(lambda nth=nth: add_all(tmp_path, step, nth))
    add_all(tmp_path)
    found = f"SELECT day, epoch, row FROM read_parquet('{tmp_path}/out/**/*.parquet', hive_partitioning = true)"
    wanted = f"""SELECT d AS day, e AS epoch, n AS row
        FROM (VALUES (DATE '{DAYS[0]}'), (DATE '{DAYS[1]}')) AS d(d), range({BATCHES}) AS e(e), range(5) AS n(n), range(2)"""
    ask = duckdb.connect()
    assert ask.execute(f"({found}) EXCEPT ALL ({wanted})").fetchall() == []
    assert ask.execute(f"({wanted}) EXCEPT ALL ({found})").fetchall() == []
    assert list((tmp_path / "out" / "_headwater" / "staged").iterdir()) == []


SALES: list[dict[str, Any]] = [
    {"id": number, "country": country, "day": f"2026-01-{number % 3 + 1:02}", "amount": number / 2}
    for number, country in enumerate(["PE", "DE", "a/b c", "ü=%", None, "PE", "DE", "PE"])
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_application_partitions_its_files(tmp_path: Path, spark: SparkSession) -> None:
    """Any value may name a folder, none too; a later batch adds to the folders, and DuckDB reads the columns back from them."""
    log = hw.open_log(tmp_path / "log")
    log.create_topic("sales", "id BIGINT, country STRING, day STRING, amount DOUBLE")
    app = hw.App("shop", log=log.url, spark=spark)
    app.sink("sales", to=f"{tmp_path}/warehouse", partition_by=["country", "day"], name="files")
    for part in (SALES[:5], SALES[5:]):
        log.append("sales", part)
        app.run(available_now=True)
    files = f"read_parquet('{tmp_path}/warehouse/**/*.parquet', hive_partitioning = true, hive_types_autocast = false)"
    found = duckdb.sql(f"select id, country, day, amount from {files} order by id").fetchall()
    assert found == [tuple(sale.values()) for sale in SALES]
    assert len(list((tmp_path / "warehouse" / "country=PE" / "day=2026-01-01").iterdir())) == 1
    log.close()


@pytest.mark.slow
def test_partitions_that_cannot_be_are_refused_before_anything_starts(tmp_path: Path, spark: SparkSession) -> None:
    log = hw.open_log(tmp_path / "log")
    log.create_topic("sales", "id BIGINT, country STRING")
    for columns, said in (
        (["nation"], "column 'nation' of partition_by does not exist"),
        (["id", "country"], "no column is left"),
    ):
        app = hw.App("shop", log=log.url, spark=spark)
        app.sink("sales", to=f"{tmp_path}/warehouse", partition_by=columns)
        with pytest.raises(InvalidApp, match=said):
            app.run(available_now=True)
    with pytest.raises(InvalidApp, match="not a folder"):
        app.sink("sales", to="redis://localhost/0", partition_by="country", name="other")
    with pytest.raises(InvalidInput, match="is not valid"):
        FileSink("./out?partition=day", stage="s")
    log.close()


def test_a_delta_table_is_partitioned_and_rows_move_between_partitions(tmp_path: Path) -> None:
    """An update that changes the partition's column leaves one row; another partitioning than the table's is refused."""
    url = f"delta:///{tmp_path}/users"
    sink = open_sink(f"{url}?partition_by=name", stage="s")
    sink.open(SHAPE)
    first = [(f"k{n}", {"name": f"part {n % 2}", "n": n}) for n in range(10)]
    second = [("k1", {"name": "part 0", "n": 1}), ("k2", None), ("new", {"name": None, "n": 9})]
    write(sink, 0, batch(first))
    write(sink, 1, batch(second, first=10))
    assert delta_rows(tmp_path / "users") == folded(first, second)
    assert {path.name for path in (tmp_path / "users").glob("name=*")} >= {"name=part%200", "name=part%201"}
    open_sink(url, stage="s").open(SHAPE)
    with pytest.raises(InvalidInput, match="partitioned by name, not by n"):
        open_sink(f"{url}?partition_by=n", stage="s").open(SHAPE)
    with pytest.raises(InvalidInput, match="column 'x' does not exist"):
        open_sink(f"delta:///{tmp_path}/other?partition_by=x", stage="s").open(SHAPE)
