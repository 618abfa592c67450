"""The border to Spark: how an error of ours crosses from a Python worker over the JVM to whoever asked.

Spark carries an error of a worker as text, with a traceback through its own modules in front. What we refuse is refused with
a sentence that says what to do next, so the traceback only hides it: `crossing` leaves it out (`HEADWATER_DEBUG=1` keeps it), and
`our_error_in` makes an error of ours again of what Spark raised in the driver.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.model import errors
from headwater.model.errors import HeadwaterError

_HIDE = "SPARK_HIDE_TRACEBACK"
_WORKER = "PYTHON_WORKER_FACTORY"
_OURS = re.compile(r"headwater\.model\.errors\.(\w+): (.+)")


@contextmanager
def crossing() -> Iterator[None]:
    """Stands around everything that Spark calls in a worker.

    Spark's own switch is an environment variable of the worker, and a worker ends with the first error: it is set for this
    error only.
    """
    try:
        yield
    except HeadwaterError:
        if any(name.startswith(_WORKER) for name in os.environ) and not os.environ.get("HEADWATER_DEBUG"):
            os.environ[_HIDE] = "1"
        raise


def our_error_in(error: BaseException) -> HeadwaterError | None:
    """The error of ours inside one that Spark raised in the driver; None where it is not about us."""
    found = _OURS.search(str(error))
    kind = getattr(errors, found[1], None) if found else None
    if found is None or not (isinstance(kind, type) and issubclass(kind, HeadwaterError)):
        return None
    return kind(found[2].strip())
