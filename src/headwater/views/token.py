"""A token: the place of a subscriber between two changes of a view, from which it goes on exactly.

It names the view, its generation, the topic of changes by its id, and the next offset of each partition, and is text that
needs no escaping anywhere. A token of another generation or topic is no place any more: the subscriber is told so ("reset").
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from headwater.model.errors import InvalidInput
from headwater.model.position import Position

_PREFIX = "hwv1."


class Token(msgspec.Struct, frozen=True):
    """A place in the changes of one generation of a view."""

    view: str
    generation: int
    topic_id: str
    positions: dict[int, int]
    incarnation: int = 0

    def __str__(self) -> str:
        raw = base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")
        return _PREFIX + raw

    def starts(self, topic: str) -> list[Position]:
        """The positions to read from."""
        return [Position(topic, number, offset, self.incarnation) for number, offset in self.positions.items()]


def is_token(text: object) -> bool:
    """Whether this is meant as a token."""
    return isinstance(text, Token) or (isinstance(text, str) and text.startswith(_PREFIX))


def parse_token(text: object, *, view: str) -> Token:
    """The token that a text is; `InvalidInput` if it is none, or one of another view."""
    if isinstance(text, Token):
        token = text
    else:
        try:
            raw = str(text).removeprefix(_PREFIX)
            token = msgspec.json.decode(base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)), type=Token)
        except (binascii.Error, msgspec.MsgspecError, ValueError, RecursionError):
            raise InvalidInput(
                f"{str(text)[:40]!r} is not a token of a view.", advice="Pass the token of a change, or leave it out."
            ) from None
    if token.view != view:
        raise InvalidInput(
            f"The token belongs to view {token.view!r}, not to {view!r}.", advice="Keep a separate token for each view."
        )
    return token
