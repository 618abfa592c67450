"""A table as a function gets it: the newest row per key of a topic, which is not a DataFrame.

Joining a stream with "the table" has no answer that a replay would give again: it depends on when it is asked. So only what has
one is offered: `changes`, the stream of its changes.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pyspark.sql import DataFrame

from headwater.model.errors import Unsupported


class Table:
    """What stands for a table inside a stage's function."""

    def __init__(self, name: str, changes: DataFrame) -> None:
        self.name = name
        self.changes = changes

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise Unsupported(
            f"Table {self.name!r} has no {attribute!r}: it is not a DataFrame.",
            advice=f"Use {self.name}.changes, the stream of its changes.",
        )

    def __getitem__(self, item: Any) -> NoReturn:
        raise Unsupported(
            f"Table {self.name!r} cannot be indexed: it is not a DataFrame.",
            advice=f"Use {self.name}.changes, the stream of its changes.",
        )
