"""How a script's functions reach Spark's workers: by value, since the script is no module that they could import."""

from __future__ import annotations

from types import ModuleType

from pyspark import cloudpickle


def ship_by_value(module: ModuleType) -> None:
    """Everything that the module defines travels with the queries that use it."""
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
