"""Sinks that apply transactions of captured servers whole: what is committed by PostgreSQL and MariaDB arrives as it was committed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from headwater.capture import events
from tests.rigs.app.mirror_app import Onlooker, declared, life, until
from tests.rigs.capture import mysql as capture_mysql_rig
from tests.rigs.capture import postgres as capture_postgres_rig
from tests.rigs.capture.bank import Ask, Bank, looking, rows_by

PAUSE_S = 0.05
NOTES = "select count(*), count(note), min(note), max(note) from accounts"


@contextmanager
def postgres_bank(request: pytest.FixtureRequest, folder: Path) -> Iterator[Bank]:
    with capture_postgres_rig.rigged(request.getfixturevalue("postgres"), folder) as rig:

        @contextmanager
        def connected() -> Iterator[Ask]:
            with psycopg.connect(rig.url, autocommit=True) as connection:
                yield connection.execute

        yield Bank(rig.url, connected)


@contextmanager
def mariadb_bank(request: pytest.FixtureRequest, folder: Path) -> Iterator[Bank]:
    with capture_mysql_rig.rigged(request.getfixturevalue("mariadb"), folder) as rig:

        @contextmanager
        def connected() -> Iterator[Ask]:
            with closing(capture_mysql_rig.connect(rig.server, rig.name)) as connection:

                def ask(statement: str) -> object:
                    cursor = connection.cursor()
                    cursor.execute(statement)
                    return cursor

                yield ask

        yield Bank(rig.url, connected)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("open_bank", "kind", "die_at", "die_on"),
    [
        pytest.param(
            postgres_bank, "sqlite", "sink: piece applied", 8, marks=pytest.mark.service("postgres"), id="postgres"
        ),
        pytest.param(mariadb_bank, "duckdb", "sink: committed", 3, marks=pytest.mark.service("mariadb"), id="mariadb"),
    ],
)
def test_a_target_is_always_what_its_server_was_at_a_commit(
    open_bank: Callable[[pytest.FixtureRequest, Path], AbstractContextManager[Bank]],
    kind: str,
    die_at: str,
    die_on: int,
    tmp_path: Path,
    spark: SparkSession,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While clients write: through the copy, a kill, transactions that are spilled, and a column that gives every row another value."""
    monkeypatch.setattr(events, "SPILL_BYTES", 1 << 16)
    with open_bank(request, tmp_path) as bank:
        bank.make()
        onlooker = Onlooker(bank, f"{kind}:///{tmp_path}/copy.{kind}")
        with bank.busy(seed=13, pause_s=PAUSE_S):
            assert life(tmp_path, bank.url, onlooker, die_at=die_at, die_on=die_on) == -signal.SIGKILL
        assert onlooker.seen
        app = declared(tmp_path, bank.url, {"copy": onlooker.url}, spark=spark)
        app.start()
        try:
            with bank.busy(seed=17, pause_s=PAUSE_S), bank.connected() as ask:
                wait_for_more(onlooker)
                bank.pay(ask)
                wait_for_more(onlooker)
                ask("alter table accounts add column note varchar(20) default 'none'")
                bank.pay(ask)
                wait_for_more(onlooker)
            until(lambda: onlooker.has_all, onlooker)
        finally:
            app.stop()
        with looking(onlooker.url) as ask_copy, bank.connected() as ask:
            assert rows_by(ask_copy) == bank.rows()
            assert list(ask_copy(NOTES).fetchall()) == list(ask(NOTES).fetchall())


def wait_for_more(onlooker: Onlooker) -> None:
    """Until some states have been seen that were none before."""
    before = len(onlooker.seen)
    until(lambda: len(onlooker.seen) >= before + 4, onlooker)
