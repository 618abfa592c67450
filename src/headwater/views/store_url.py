"""Which view store a URL names.

| URL | store |
|---|---|
| `sqlite:///./data/views.db` | a SQLite file |
| `postgresql://user@host/database` | a PostgreSQL database |
"""

from __future__ import annotations

from headwater.model.errors import InvalidInput, Unsupported
from headwater.views.postgres import PostgresStore
from headwater.views.sqlite import SqliteStore
from headwater.views.store import ViewStore


def open_view_store(url: str, *, read_only: bool = False) -> ViewStore:
    """The store at a URL: `sqlite:///` and then a path, absolute or not, or `postgresql://user@host/database`."""
    scheme, found, rest = str(url).partition("://")
    if found and scheme == "sqlite":
        return SqliteStore(_sqlite_path(url, rest), read_only=read_only)
    if found and scheme in ("postgresql", "postgres"):
        return PostgresStore(url, read_only=read_only)
    shown = scheme if found else str(url)[:60]
    raise Unsupported(
        f"{shown!r} is not a kind of view store.",
        advice="Use sqlite:///./data/views.db or postgresql://user@host/database.",
    )


def _sqlite_path(url: str, rest: str) -> str:
    path = rest.partition("?")[0]
    if not path.startswith("/") or path == "/":
        raise InvalidInput(
            f"The URL {url!r} has no path.",
            advice="Write the path after sqlite:///, such as sqlite:///./data/views.db.",
        )
    return path[1:]
