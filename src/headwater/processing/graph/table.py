"""A table as a function gets it: the newest row per key of a topic, which is not a DataFrame.

Joining a stream with "the table" has no answer that a replay would give again: it depends on when it is asked. So only what has
one is offered: `changes`, the stream of its changes, and what `hw.lookup` makes of them.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.model.errors import Unsupported
from headwater.model.schema import DELETED


class Table:
    """What stands for a table inside a stage's function."""

    def __init__(self, name: str, versions: DataFrame) -> None:
        """`versions` are its changes with a column `_deleted`: a row that was deleted has its key and its time, and nothing else."""
        self.name = name
        self.versions = versions
        self.changes = versions.where(~F.col(DELETED.name)).drop(DELETED.name)

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
