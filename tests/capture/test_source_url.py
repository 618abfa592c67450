"""Sources that cannot be opened: URLs, names and files that are none, and a database that stays locked."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source, parse_source_url
from headwater.capture.sqlite import source as sqlite
from headwater.log.log import open_log
from headwater.model.errors import InvalidInput, Unsupported
from tests.rigs.capture.sqlite import USERS


@pytest.mark.parametrize(
    ("url", "kind", "word"),
    [
        ("shop.db", InvalidInput, "sqlite:///"),
        ("oracle://x/y", Unsupported, "sqlite"),
        ("postgresql://me:secret@host:x/db", InvalidInput, r"\*\*\*@host"),
    ],
)
def test_urls_that_name_no_database(url: str, kind: type[Exception], word: str) -> None:
    """And none that is refused shows its password."""
    with pytest.raises(kind, match=word) as caught:
        open_source(url)
    assert "secret" not in str(caught.value)


def test_a_password_is_never_shown() -> None:
    """Wherever it stands in the URL."""
    shown = parse_source_url("postgresql://me:secret@host:5432/db?password=secret&sslmode=require").shown
    assert shown == "postgresql://me:***@host:5432/db?password=***&sslmode=require"


def test_a_name_cannot_be_anything(tmp_path: Path) -> None:
    """It is part of the names of topics."""
    with pytest.raises(InvalidInput):
        open_source(f"sqlite:///{tmp_path}/a b.db")


def test_files_that_are_no_database_of_ours(tmp_path: Path) -> None:
    """Missing, no database, read-only: each in its own words."""
    from headwater.model.errors import Damaged, NoAccess, NotFound

    (tmp_path / "text.db").write_text("hello, this is no database at all, but long enough to be looked at " * 20)
    for name, kind in (("none.db", NotFound), ("text.db", Damaged)):
        with pytest.raises(kind):
            open_source(f"sqlite:///{tmp_path}/{name}").check()
    assert not (tmp_path / "none.db").exists()
    if os.getuid():
        (tmp_path / "text.db").chmod(0o400)
        with pytest.raises(NoAccess):
            open_source(f"sqlite:///{tmp_path}/text.db").check()


def test_a_database_that_stays_locked_says_so_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that never ends its transaction is the user's to find; nothing is left half made."""
    from headwater.model.errors import TimedOut

    monkeypatch.setattr(sqlite, "BUSY_S", 0.05)
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other, open_log(tmp_path / "log") as log:
        other.execute(USERS)
        other.execute("BEGIN IMMEDIATE")
        capture = Capture(log, open_source(f"sqlite:///{path}"))
        with pytest.raises(TimedOut) as caught:
            capture.open()
        assert caught.value.retriable
        other.execute("ROLLBACK")
        assert other.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
        capture.open()
        capture.close()
