"""A captured table held against its MariaDB, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.model.errors import InvalidInput, NotFound, Unsupported
from headwater.testing.servers.mariadb import MariaDbServer
from headwater.verify.comparison import VerifyReport, compare, open_pair
from headwater.verify.side_url import side_of
from tests.rigs.capture.mysql import follow, rigged

pytestmark = pytest.mark.service("mariadb")


def verified(source: str, target: str) -> VerifyReport:
    pair = open_pair(source, target)
    try:
        return compare(pair, settle_s=0.2)
    finally:
        pair.close()


def test_the_log_is_held_against_the_database(mariadb: MariaDbServer, tmp_path: Path) -> None:
    """By a key of several columns, in types that both know; a row that the log does not have yet is found."""
    with rigged(mariadb, tmp_path) as rig:
        rig.run(
            "create table stock (shop varchar(9), number int unsigned, price decimal(9, 2), at datetime(6), tags set('a', 'b'), "
            "primary key (shop, number))",
            "insert into stock select 'north', seq, seq / 4, '2024-01-01 10:00:00.5', 'a,b' from seq_1_to_500",
            "insert into stock (shop, number) values ('south', 1)",
        )
        here, there = f"{rig.url}?table=stock", f"{tmp_path}/log#stock"
        with rig.capture("stock") as capture:
            for source, target in ((here, there), (there, here)):
                report = verified(source, target)
                assert (report.is_equal, report.rows) == (True, 501)
            rig.run("update stock set price = 1 where number = 7", "delete from stock where shop = 'south'")
            found = {(one.kind, one.key["number"], one.columns) for one in verified(here, there).differences}
            assert found == {("different", 7, ("price",)), ("extra", 1, ())}
            follow(capture, rig)
            assert verified(here, there).is_equal


def test_what_cannot_be_compared_is_told(mariadb: MariaDbServer) -> None:
    with pytest.raises(InvalidInput, match="does not name a table"):
        side_of(mariadb.url)
    side = side_of(f"{mariadb.url}?table=gone")
    with pytest.raises(NotFound, match="'gone' does not exist"):
        side.shape()
    with pytest.raises(Unsupported, match="is not the target of a sink"):
        side.repairs("stage")
    side.close()
