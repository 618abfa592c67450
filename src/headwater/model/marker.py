"""A marker: what identifies a batch that a stage writes, so that no batch is ever written twice.

Two markers are the same when stage, query, epoch and ends are. `ends` (where the batch stops in each source) is kept as
canonical JSON: keys are text, so `{0: 5}` and `{"0": 5}` are the same ends.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.model.errors import InvalidInput


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """The batch `epoch` of a query, up to `ends` in its sources, as a stage has written it."""

    query: str
    epoch: int
    ends: Any = None
    stage: str = ""

    def __post_init__(self) -> None:
        query: Any = self.query
        epoch: Any = self.epoch
        if not isinstance(query, str) or not isinstance(epoch, int) or epoch < 0:
            raise InvalidInput(
                f"Query {query!r} and epoch {epoch!r} are not a valid marker.",
                advice="Pass the query's id as text, and an epoch of at least 0.",
            )
        try:
            ends = msgspec.json.decode(msgspec.json.encode(self.ends))
        except (TypeError, msgspec.MsgspecError):
            raise InvalidInput(
                f"The ends of a marker must be JSON, but are {self.ends!r}.",
                advice='Pass them as {"topic": {"partition": offset}}, or as another JSON value.',
            ) from None
        msgspec.structs.force_setattr(self, "ends", ends)

    def canonical(self) -> bytes:
        """The marker as it is stored: equal bytes, equal markers."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_canonical(cls, raw: bytes) -> Marker:
        """The marker that `canonical` gave."""
        return msgspec.json.decode(raw, type=cls)

    def __str__(self) -> str:
        return f"epoch {self.epoch} of query {self.query!r}"
