"""Text that users give: whether it can be stored as UTF-8, and regular expressions that cannot be compiled.

A Python string may hold half of a surrogate pair, which no file, database or terminal takes. It comes from bytes on the command line
that are not UTF-8, and from broken JSON.
"""

from __future__ import annotations

import re
import warnings

from headwater.model.errors import InvalidInput


def is_text(text: str) -> bool:
    """Whether the text can be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_text(text: str, what: str) -> str:
    """Returns the text, or raises `InvalidInput` if it is not valid UTF-8. `what` names it at the start of the message."""
    if not is_text(text):
        raise InvalidInput(
            f"{what} {text!r:.80} contains half of a surrogate pair, which is not a valid character.",
            advice="Use valid UTF-8.",
        )
    return text


def compiled_pattern(pattern: str, *, what: str = "") -> re.Pattern[str]:
    """Compiles a regular expression over topic names; raises `InvalidInput` if it is not valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # of a syntax that may come; the pattern matches names all the same
            return re.compile(check_text(pattern, "The pattern"))
    except (re.error, TypeError, AttributeError, RecursionError, OverflowError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidInput(
            f"{what}{pattern!r:.80} is not a regular expression: {why}.",
            advice='Use a regular expression such as "orders.*".',
        ) from None
