"""An address: the URL of a database, a cache or an index, split into Headwater's options and the client's URL.

    postgresql://me@host/shop?table=users&password_env=SHOP_PASSWORD&sslmode=require

`password_env` and `password_file` say where the password is, so that no URL has to hold it; one that stands in the URL works, and is left
out of everything that is shown. What else stands behind the question mark is for the client, where it takes such. Functions
and frozen data only: safe from any thread.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

import msgspec

from headwater.model.errors import InvalidInput, Unsupported
from headwater.model.extras import install_advice
from headwater.model.url import without_password

SECRETS = ("password_env", "password_file")
"""The options that say where a password is."""


class DatabaseAddress(msgspec.Struct, frozen=True):
    """A URL in parts. `client` is what the client is given; `shown` has neither a password nor what only we understand."""

    scheme: str
    client: str
    options: Mapping[str, str]
    shown: str
    password: str | None = None

    @property
    def path(self) -> str:
        """The file or folder that `scheme:///path` names."""
        path = self.client.partition("://")[2]
        if not path.startswith("/") or path == "/":
            raise InvalidInput(
                f"The URL {self.shown!r} has no path.",
                advice=f"Write the path after {self.scheme}:///, such as {self.scheme}:///./data/shop.db.",
            )
        return path[1:]


def parse_address(url: str, *, options: Collection[str], others: bool = False) -> DatabaseAddress:
    """The parts of a URL; `options` are those that are meant for us, `others` says that the client takes more."""
    bare, _, query = url.partition("?")
    found = dict(parse_qsl(query, keep_blank_values=True))
    ours = {name: found.pop(name) for name in (*options, *SECRETS) if name in found}
    if found and not others:
        raise InvalidInput(
            f"The URL {without_password(url)!r} has the unknown option {next(iter(found))!r}.",
            advice=f"The known options are: {', '.join(sorted(options)) or 'none'}.",
        )
    rest = "&".join(f"{name}={quote(value, safe='/:,')}" for name, value in found.items())
    shown = without_password(bare if not ours.get("table") else f"{bare}?table={ours['table']}")
    client = f"{bare}?{rest}" if rest else bare
    return DatabaseAddress(bare.partition("://")[0], client, ours, shown, password_of(ours, shown))


def quoted(name: str) -> str:
    """An SQL name, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def load_client(module: str, *, extra: str, purpose: str) -> Any:
    """A client that is installed by an extra; `Unsupported` says which."""
    try:
        return import_module(module)
    except ImportError as error:
        raise Unsupported(
            f"{purpose} needs {module.partition('.')[0]}: {error}.", advice=install_advice(extra)
        ) from None


def password_of(options: Mapping[str, str], shown: str) -> str | None:
    """The password that `password_env` or `password_file` leads to; `InvalidInput` where there is none."""
    if name := options.get("password_env"):
        if name not in os.environ:
            raise InvalidInput(
                f"{shown}: The environment variable {name} is not set.", advice=f"Set it: export {name}=…."
            )
        return os.environ[name]
    if file := options.get("password_file"):
        try:
            return Path(file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InvalidInput(
                f"{shown}: The password file {file} is not readable ({error.strerror}).",
                advice="Write the password to this file, or correct the path.",
            ) from None
    return None
