"""Failures of a database's client in our words, without its own traceback and without what that may show: a URL with its password.

Functions only: safe from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwater.model.errors import HeadwaterError


@contextmanager
def in_our_words(
    problem_of: Callable[[Exception], HeadwaterError | None], *, then: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Raises `problem_of(error)` in place of an error, after `then`; where that is None the error is not the client's, and stays."""
    try:
        yield
        return
    except HeadwaterError:
        raise
    except Exception as error:
        problem = problem_of(error)
        if problem is None:
            raise
    then()
    raise problem  # outside of the handler, so that not even its context has a password in it
