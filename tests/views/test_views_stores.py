"""The view stores pass one contract: SQLite in a file, and a real PostgreSQL."""

from __future__ import annotations

import traceback
import uuid
from pathlib import Path

import pytest

from headwater.log.log import Log
from headwater.model.errors import HeadwaterError, InvalidInput, Unreachable, Unsupported
from headwater.model.url import without_password
from headwater.testing.contracts.case import refused
from headwater.testing.contracts.views import Feeder, ViewStoreContract
from headwater.testing.servers.postgres import PostgresServer
from headwater.views.definition import define_view
from headwater.views.store_url import open_view_store


class TestSqlite(ViewStoreContract):
    """A file."""

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/views.db"


@pytest.mark.service("postgres")
class TestPostgres(ViewStoreContract):
    """A schema of its own for each test."""

    @pytest.fixture
    def store_url(self, postgres: PostgresServer) -> str:
        return new_schema(postgres)

    def test_what_postgres_cannot_hold_is_refused_before_it_is_in_the_log(self, log: Log, store_url: str) -> None:
        """A NUL in a text would make a batch that can never be applied; a long name a table that nobody finds."""
        store = open_view_store(store_url)
        feeder = Feeder(log, store, define_view("v", "k STRING", key="k"))
        with refused(InvalidInput, "NUL", "column k"):
            feeder.give([{"k": "a\0b"}])
        assert log.offsets("v.changes") == {0: range(0)}
        with refused(InvalidInput, "63 bytes"):
            Feeder(log, store, define_view("v" * 70, "k STRING", key="k"))
        assert log.topics() == ["headwater.views", "v.changes"]
        store.close()

    def test_a_password_is_never_shown(self, postgres: PostgresServer) -> None:
        """Not in errors, whoever refuses, nor in the store's own address."""
        for address in (
            f"postgresql://postgres:s3cret@127.0.0.1:{postgres.port}/nowhere",
            "postgresql://me:s3cret@127.0.0.1:1/x",
            "postgresql://me@127.0.0.1:1/x?password=s3cret",
            "postgresql://me:s3cret@[bad/x",
        ):
            with pytest.raises(HeadwaterError) as caught:
                open_view_store(address)
            assert isinstance(caught.value, Unreachable) and caught.value.advice
            assert "s3cret" not in "".join(traceback.format_exception(caught.value, chain=False))
            assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_a_password_is_cut_out_of_addresses() -> None:
    """The user's name stays."""
    assert without_password("postgresql://me:a:b%40c@host:5432/db") == "postgresql://me@host:5432/db"
    assert without_password("postgresql://host/db?password=x&sslmode=require") == (
        "postgresql://host/db?password=…&sslmode=require"
    )


@pytest.mark.parametrize("url", ["mysql://x/y", "views.db", "sqlite://", "sqlite:///", "sqlite://host/x"])
def test_what_is_no_store_is_refused(url: str) -> None:
    """With the addresses that are."""
    with pytest.raises((Unsupported, InvalidInput)) as caught:
        open_view_store(url)
    assert "sqlite:///" in caught.value.advice


def new_schema(postgres: PostgresServer) -> str:
    """The address of an empty schema."""
    import psycopg

    name = f"views_{uuid.uuid4().hex}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"create schema {name}")
    return f"{postgres.url}?options=-csearch_path%3D{name}"
