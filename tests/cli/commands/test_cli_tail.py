"""`headwater tail` and `headwater sql`: what they print in a pipe, and how they end."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

import headwater as hw
from tests.rigs.commands import COMMAND, ORDERS, Command, refused, start


def test_tail_shows_the_last_events_or_all_from_a_place(command: Command) -> None:
    command("topics", "create", "n", "--schema", "n BIGINT, at TIMESTAMP", "--time", "at", "--partitions", "3")
    for n in range(12):
        command("produce", "n", stdin=f'{{"n":{n},"at":"2026-01-01T00:00:{n:02d}Z"}}\n')

    def tail(*more: str) -> list[object]:
        return [row["n"] for row in command("tail", "n", *more).rows]

    assert tail() == list(range(2, 12)), "the newest ten, in the order in which they were appended"
    assert tail("-n", "2") == [10, 11]
    assert tail("--from", "earliest") == list(range(12))
    assert tail("--from", "earliest", "--limit", "3") == [0, 1, 2]
    assert tail("--from", "latest") == []
    assert tail("--from", "2026-01-01T00:00:09") == [9, 10, 11]
    assert tail("--from", "1 second") == []
    assert tail("--where", "n % 2 = 0", "-n", "3") == [6, 8, 10], "the newest three for which it is true"
    assert sorted(tail("--from", "3"), key=int) == tail("--from", "3"), "an offset, in every partition that has it"
    assert command("tail", "n", "-n", "1", "--columns", "_offset,n").rows[0].keys() == {"_offset", "n"}
    assert {"_partition", "_time", "_appended", "_key", "n"} <= command("tail", "n", "-n", "1", "--meta").rows[0].keys()


def test_tail_counts_events_and_not_the_gaps_of_compaction(command: Command, tmp_path: Path) -> None:
    """The last N of them, however far apart their offsets are."""
    with hw.open_log(str(tmp_path / "data")) as log:
        log.create_topic("t", "id STRING, n INT", key="id", partitions=1, segment_bytes=4096, compact=True)
        log.append("t", [{"id": f"k{n}", "n": n} for n in range(5)])
        for number in range(300):
            log.append("t", [{"id": "busy", "n": number}])
        log.tidy("t")
        held = log.read("t")["n"].to_pylist()
    assert held[:5] == list(range(5)) and 5 < len(held) < 200
    for count in (1, 3, len(held) - 3, len(held), len(held) + 3):
        assert [row["n"] for row in command("tail", "t", "-n", str(count)).rows] == held[-count:]


def test_what_tail_prints_produce_takes_back(orders: Command) -> None:
    """Deletions and headers travel too."""
    with hw.open_log("data") as log, log.producer() as producer:
        producer.send("orders", None, key="o1")
        producer.send("orders", {"id": "o4"}, headers={"trace": b"x"})
    printed = orders("tail", "orders")
    assert printed.rows[-1] == {"id": "o4", "amount": None, "at": None, "_headers": {"trace": "x"}} or printed.rows[-2]
    orders("topics", "create", "copy", "--schema", ORDERS, "--key", "id", "--time", "at")
    assert orders("produce", "copy", stdin=printed.out).code == 0
    with hw.open_log("data") as log:
        assert log.table("copy").sort_by("id").equals(log.table("orders").sort_by("id"))


def test_tables_cannot_be_steered_by_what_a_topic_holds(orders: Command) -> None:
    orders("produce", "orders", stdin='{"id":"\\u001b[2J\\nx","amount":1}\n')
    for command in (["tail", "orders", "--format", "table"], ["sql", "from orders", "--format", "table"]):
        printed = orders(*command).out
        assert "\x1b" not in printed and "\\x1b[2J" in printed


def test_sql_answers_over_topics(orders: Command) -> None:
    assert orders("sql", "select sum(amount) as total, count(*) as n from orders").rows == [{"total": 7.5, "n": 3}]
    assert orders("sql", "select id from Orders where amount > 2 order by 1", "--format", "csv").out == "id\no2\no3\n"
    assert "o3" in orders("sql", "from orders", "--format", "table").out
    assert len(orders("sql", "select a.id from orders a join orders b using (id)").rows) == 3, "a topic twice"
    [meta] = orders("sql", "select _partition, _offset, _time, _appended, _key, _deleted from orders limit 1").rows
    assert meta["_key"] in {"o1", "o2", "o3"} and meta["_deleted"] is False
    assert orders("sql", "select 1 as a, 2 as a").rows == [{"a": 1, "a_1": 2}]


def test_sql_takes_names_with_dots_and_dashes_in_quotes(command: Command) -> None:
    command("topics", "create", "shop.orders-eu")
    command("produce", "shop.orders-eu", stdin="x\n")
    assert command("sql", 'select value from "shop.orders-eu"').rows == [{"value": "x"}]
    refused(command("sql", "select * from shop.orders"), "(topic_not_found|invalid_input)", "double quotes")


@pytest.mark.parametrize(
    "query",
    [
        "insert into orders values (1)",
        "create table t as select 1",
        "copy (select 1) to 'out.csv'",
        "select * from read_csv('secret.csv')",
        "select * from 'secret.csv'",
        "attach 'x.db'",
        "set enable_external_access = true",
        "install httpfs",
    ],
)
def test_sql_only_reads_and_only_topics(orders: Command, query: str) -> None:
    Path("secret.csv").write_text("a\n1\n")
    refused(orders("sql", query), "(invalid_input|topic_not_found)")
    assert not Path("out.csv").exists() and not Path("x.db").exists()


def test_a_pipe_that_closes_early_ends_tail_quietly(orders: Command) -> None:
    """`headwater tail | head -1`."""
    orders("produce", "orders", stdin='{"id":"x"}\n' * 20_000)
    pipe = f"{' '.join(COMMAND)} tail orders --from earliest | head -1"
    process = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True)
    assert json.loads(process.stdout)["id"] in {"o1", "o2", "o3"}
    assert process.stderr == ""


def test_tail_follows_and_ends_quietly_with_ctrl_c(orders: Command) -> None:
    process = start("tail", "orders", "-f", "-n", "1")
    assert process.stdout is not None
    process.stdout.readline()
    orders("produce", "orders", stdin='{"id":"new"}\n')
    assert json.loads(process.stdout.readline())["id"] == "new"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.slow
def test_ctrl_c_ends_a_question_that_takes_too_long(orders: Command) -> None:
    process = start("sql", "select count(*) from range(1000000000) a, range(1000) b, orders")
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, b"")
