"""Lazy names: a package's public names, each imported from its home when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from headwater.model.extras import missing_extra


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package. `homes` gives the module of each name; a name that is a module of the package has that."""

    def get(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(home)
        except ModuleNotFoundError as error:
            raise missing_extra(error, purpose=f"{package}.{name}") or error from None
        return module if home == f"{package}.{name}" else getattr(module, name)

    return get
