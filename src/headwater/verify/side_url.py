"""Which side a URL names.

| URL | side |
|---|---|
| `./data#users`, `kafka://…#users` | the table of a topic; the rows of a view, where there is no topic of that name |
| `sqlite:///…?table=`, `duckdb:///…?table=`, `postgresql://…?table=` | a table |
| `mariadb://…?table=`, `mysql://…?table=` | a table, to compare only |
| `mongodb://…?table=`, `couchdb://…/users` | documents, to compare only |
| `redis://…?prefix=&as=` | the keys of a prefix |
| `tantivy:///…`, `opensearch://host:9200/…`, `delta:///…` | an index, a Delta table |
| `./warehouse/users`, `parquet:///…` | a folder of Parquet files |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwater.model.errors import Unsupported
from headwater.sinks.sink import Shape
from headwater.verify.document_side import DocumentSide
from headwater.verify.log_sides import open_log_side
from headwater.verify.mysql_side import MySqlSide
from headwater.verify.postgres_side import PostgresSide
from headwater.verify.side import VerifySide
from headwater.verify.store_sides import DeltaSide, OpenSearchSide, ParquetSide, RedisSide, SearchSide
from headwater.verify.table_sides import DuckdbSide, SqliteSide

_SIDES: dict[str, Callable[[str], VerifySide]] = {
    "sqlite": SqliteSide,
    "duckdb": DuckdbSide,
    "postgresql": PostgresSide,
    "postgres": PostgresSide,
    "mariadb": MySqlSide,
    "mysql": MySqlSide,
    "mongodb": DocumentSide,
    "couchdb": DocumentSide,
    "couchdbs": DocumentSide,
    "redis": RedisSide,
    "rediss": RedisSide,
    "tantivy": SearchSide,
    "opensearch": OpenSearchSide,
    "opensearch+https": OpenSearchSide,
    "delta": DeltaSide,
    "parquet": ParquetSide,
}


def side_of(url: str) -> VerifySide:
    """The side of a URL; its columns are taken later."""
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme in _SIDES:
        return _SIDES[scheme](url)
    if "#" in url:
        return open_log_side(url)
    if not scheme:
        return ParquetSide(url)
    raise Unsupported(
        f"A comparison does not support {scheme}://.", advice=f"Use LOG#TOPIC, a folder, or one of {', '.join(_SIDES)}."
    )


@contextmanager
def open_side(url: str, *, shape: Shape) -> Iterator[VerifySide]:
    """The side of a URL, in these columns."""
    side = side_of(url)
    try:
        side.take(shape)
        yield side
    finally:
        side.close()
