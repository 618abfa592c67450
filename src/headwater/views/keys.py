"""The key of a view's row, as a user gives it: see `headwater.databases.keys` for its text. Functions only: safe from any thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from headwater.databases.keys import key_texts
from headwater.log.arrow.rows import to_batch
from headwater.model.errors import InvalidInput
from headwater.views.definition import ViewDefinition


def key_text(definition: ViewDefinition, key: Mapping[str, Any]) -> str:
    """The text of one key, given as its columns' values."""
    if set(key) != set(definition.key) or not definition.key:
        wanted = ", ".join(definition.key) or "empty, because its rows are append-only"
        raise InvalidInput(
            f"The key of view {definition.name!r} is {wanted}; got {', '.join(key) or 'nothing'}.",
            advice="Pass each key column once, such as get(page='/').",
        )
    fields = [definition.schema.field(column).with_nullable(True) for column in definition.key]
    return key_texts(to_batch([dict(key)], pa.schema(fields)), definition.key)[0].as_py()
