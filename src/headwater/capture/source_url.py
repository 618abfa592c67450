"""Opening a source by its URL: the scheme says which kind of database it is.

    sqlite:///shop.db                                   a file, relative to where the program runs
    sqlite:////var/lib/shop.db                          a file by its whole path
    postgresql://user@host/shop?password_env=SHOP_PW    the password from the environment, or `password_file=`
    mariadb://user@host:3306/shop                       MariaDB, and as mysql:// MySQL; either reads both
    mongodb://user@host/shop?password_env=SHOP_PW       a database of MongoDB, whose collections are the tables
    couchdb://user@host/shop?password_env=SHOP_PW       a database of CouchDB, which is one table; couchdbs:// is HTTPS
    poll+sqlite:///shop.db?by=updated_at                asked again and again, by a column that increases; also poll+postgresql
    debezium+kafka://host:9092?topics=shop.inventory    topics that Debezium fills: see `headwater.capture.debezium.source`

`?table=users` (repeated or with commas) names the tables; without it all tables of the database are captured that can be. A password that
stands in the URL works, and is masked wherever the URL is shown or kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec

from headwater.capture.source import CaptureSource
from headwater.databases.address import password_of
from headwater.log.port.topic import check_name
from headwater.model.errors import InvalidInput, Unsupported
from headwater.model.extras import EXTRAS, install_advice

if TYPE_CHECKING:
    from headwater.capture.documents import DocumentStore

_HOMES = {
    "sqlite": "headwater.capture.sqlite.source",
    "postgresql": "headwater.capture.postgres.source",
    "mariadb": "headwater.capture.mysql.source",
    "mysql": "headwater.capture.mysql.source",
    "mongodb": "headwater.capture.mongodb.source",
    "couchdb": "headwater.capture.couchdb.source",
    "couchdbs": "headwater.capture.couchdb.source",
    "poll+sqlite": "headwater.capture.poll.source",
    "poll+postgresql": "headwater.capture.poll.source",
    "debezium+kafka": "headwater.capture.debezium.source",
    "debezium+file": "headwater.capture.debezium.source",
}
"""The module of each kind of database, loaded when one is opened; its function `source_of` makes the source."""


class SourceUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A source's URL, taken apart. `options` are what stands behind `?`, but for the tables."""

    scheme: str
    user: str | None
    password: str | None
    host: str
    port: int | None
    path: str
    tables: tuple[str, ...]
    options: Mapping[str, str]

    @property
    def database(self) -> str:
        """The database by its bare name: for a file its name without the ending, for topics of Debezium what they begin with."""
        return self.options.get("topics", "").partition(".")[0] if self.is_topics else PurePosixPath(self.path).stem

    @property
    def is_topics(self) -> bool:
        """Whether this is a log with topics, not a database."""
        return self.scheme.startswith("debezium+")

    @property
    def shown(self) -> str:
        """The URL without its tables, and with the password masked."""
        who = "" if self.user is None else quote(self.user) + ("" if self.password is None else ":***") + "@"
        where = self.host if self.port is None else f"{self.host}:{self.port}"
        options = {name: "***" if name.split(".")[-1] == "password" else value for name, value in self.options.items()}
        query = f"?{urlencode(options, safe='*')}" if options else ""
        return f"{self.scheme}://{who}{where}{'/' if self.scheme.endswith('sqlite') else ''}{quote(self.path)}{query}"

    def read_password(self) -> str | None:
        """The password from wherever the URL says that it is, read anew each time, so that it may change."""
        return password_of(self.options, self.shown) or self.options.get("password") or self.password


def parse_source_url(url: str) -> SourceUrl:
    """Takes a URL apart; `InvalidInput`."""
    scheme, found, rest = url.partition("://")
    if not found or not rest:
        raise InvalidInput(
            f"{_masked(url)!r} is not the URL of a database.",
            advice="Use sqlite:///shop.db or postgresql://user@host/shop.",
        )
    try:
        parts = urlsplit(f"//{rest}")
        port = None if scheme.startswith("debezium+") else parts.port
    except ValueError:
        raise InvalidInput(
            f"{_masked(url)!r} is not a valid URL.", advice="Use postgresql://user@host:5432/shop."
        ) from None
    scheme = scheme + "ql" if scheme in ("postgres", "poll+postgres") else scheme
    path = parts.path[1:] if scheme.endswith("sqlite") else parts.path
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    tables = [name for key, value in pairs if key in ("table", "tables") for name in value.split(",") if name]
    return SourceUrl(
        scheme=scheme,
        user=None if parts.username is None else unquote(parts.username),
        password=None if parts.password is None else unquote(parts.password),
        host=parts.netloc if scheme.startswith("debezium+") else parts.hostname or "",
        port=port,
        path=unquote(path),
        tables=tuple(dict.fromkeys(tables)),
        options={key: value for key, value in pairs if key not in ("table", "tables")},
    )


def open_source(
    url: str,
    tables: Sequence[str] | None = None,
    *,
    name: str | None = None,
    key: Mapping[str, Sequence[str]] | None = None,
) -> CaptureSource:
    """The source at a URL; nothing is connected or made yet.

    `tables` are added to those that the URL names; none at all means every table that can be captured. `name` is what the log calls
    the source, by default the database's own name. `key` gives, for a table without a primary key, columns that are unique and never null.
    """
    parsed = parse_source_url(url)
    parsed = msgspec.structs.replace(parsed, tables=tuple(dict.fromkeys([*parsed.tables, *(tables or ())])))
    name = check_name(name or parsed.database, of="source")
    keys = {table: tuple(columns) for table, columns in (key or {}).items()}
    if parsed.scheme not in _HOMES:
        raise Unsupported(
            f"Headwater cannot capture {parsed.scheme!r} databases.", advice=f"Use one of {', '.join(_HOMES)}."
        )
    source: CaptureSource = _home(parsed.scheme).source_of(parsed, name=name, keys=keys)
    return source


def open_documents(url: str) -> DocumentStore:
    """The documents of a database of MongoDB or CouchDB; nothing is connected yet."""
    parsed = parse_source_url(url)
    store: DocumentStore = _home(parsed.scheme).documents_of(parsed)
    return store


def _home(scheme: str) -> Any:
    try:
        return import_module(_HOMES[scheme])
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"A capture of a {scheme!r} database needs the package {error.name}.",
            advice=install_advice(EXTRAS.get((error.name or "").partition(".")[0], "all")),
        ) from None


def _masked(url: str) -> str:
    """A URL that cannot be read may still hold a password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://***@{rest.rpartition('@')[2]}" if "@" in rest else url
