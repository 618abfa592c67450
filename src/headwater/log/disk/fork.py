"""Forks: what a child process must do with handles it was born with.

A forked child has copies of its parent's files, locks and half-filled batches, none of which are its own. Objects that hold
such things register here, and are told in the child before anything else runs.

One lock is out of their reach: PyArrow imports pandas under a lock of its own when it builds its first array. A child that is
forked while another thread does so would wait for that lock for ever, so a fork waits until the import has ended.
"""

from __future__ import annotations

import os
import weakref
from functools import cache
from typing import Protocol

import pyarrow as pa


class Forked(Protocol):
    """Something that has to know that it is in a forked child."""

    def _forked(self) -> None:
        """Called in the child, once, while it has a single thread."""


def tell_when_forked(handle: Forked) -> None:
    """The handle is told in every child that is forked while it lives."""
    _handles().add(handle)


@cache
def _handles() -> weakref.WeakSet[Forked]:
    """Every such handle of this process; the hook is set once and cannot be taken back."""
    handles: weakref.WeakSet[Forked] = weakref.WeakSet()

    def tell() -> None:
        for handle in list(handles):
            handle._forked()

    os.register_at_fork(before=_end_import_of_pandas, after_in_child=tell)
    return handles


def _end_import_of_pandas() -> None:
    """Builds an array, which waits for the import or does it. Afterwards PyArrow never takes its lock again."""
    pa.array([None])
