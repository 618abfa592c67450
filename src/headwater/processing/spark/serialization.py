"""How a script's functions reach other processes: by value, since the script is no module that they could import."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from pyspark import cloudpickle


def ship_by_value(module: ModuleType) -> None:
    """Everything that the module defines travels with the queries that use it."""
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def pickled(thing: object, modules: Iterable[ModuleType]) -> bytes:
    """A thing with everything that it uses of these modules; what it uses of others is imported where it is unpickled."""
    for module in modules:
        ship_by_value(module)
    data: bytes = cloudpickle.dumps(thing)  # type: ignore[no-untyped-call]
    return data
