"""Text that users give: whether it can be stored as UTF-8, and regular expressions that cannot be compiled.

A Python string may hold half of a surrogate pair, which no file, database or terminal takes. It comes from bytes on the command line
that are not UTF-8, and from broken JSON.
"""

from __future__ import annotations

import re
import warnings

from headwater.model.errors import InvalidInput


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_text(text: str, what: str) -> str:
    """The text itself; `InvalidInput` where it cannot be written as UTF-8. `what` names it at the start of a sentence."""
    if not is_text(text):
        raise InvalidInput(
            f"{what} {text!r:.80} holds a character that is half of a surrogate pair.", advice="Write it in UTF-8."
        )
    return text


def compiled_pattern(pattern: str, *, what: str = "") -> re.Pattern[str]:
    """A regular expression that names of topics are matched with; `InvalidInput` says what is wrong with it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # of a syntax that may come; the pattern matches names all the same
            return re.compile(check_text(pattern, "The pattern"))
    except (re.error, TypeError, AttributeError, RecursionError, OverflowError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise InvalidInput(
            f"{what}{pattern!r:.80} is not a regular expression: {why}.", advice='Such as "orders.*".'
        ) from None
