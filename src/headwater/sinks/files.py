"""A folder of files as a sink, for whoever reads Parquet, JSON or CSV: each batch adds its files once.

    <folder>/<query>-<epoch>-<number>.parquet   the files of one batch; readers of the folder see these only
    <folder>/day=2026-01-31/<query>-…           with `?partition_by=day`: a folder for each value, as Hive and Spark name them
    <folder>/_headwater/ledger.json             the marker of the batch that was added last
    <folder>/_headwater/lock                    its lock is held while files are moved and the ledger is written
    <folder>/_headwater/staged/<any>/           what one attempt of a batch is written to before it counts

A batch is written aside, its files are moved into the folder under names that it alone has, and then the ledger names its marker.
A crash in between leaves some of its files: the batch is run again, and replaces them by the same names before it is entered. So
after any crash the folder holds each batch once; while files are moved a reader may see a part of the newest one. The rules for
what may follow a marker are the log's own (`headwater.log.port.stage.is_new`).

Invariants:
- the ledger is looked at again under the lock before anything in the folder is touched: a writer that was overtaken while it
  slept adds nothing and removes nothing;
- an attempt writes to a folder that nobody else uses, and only whoever adds a batch sweeps those of others: they cannot add theirs
  any more, since the same batch or a later one is there.

Names that begin with "_" are left out by Spark, pyarrow and DuckDB when they read a folder. Thread-safety: none.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import parse_qsl

from headwater.log.port.stage import is_new
from headwater.model.errors import InvalidInput, TimedOut, Unsupported
from headwater.model.marker import Marker
from headwater.model.points import PROCESS
from headwater.sinks.sink import column_names, is_target

FileFormat = Literal["parquet", "json", "csv"]

LOCK_S = 10.0

_FOLDER = "_headwater"
_LOOK_S = 0.02
_ESCAPED = frozenset("\"#%'/:=\\{]^\x7f") | {chr(code) for code in range(1, 32)}


def is_folder(to: str) -> bool:
    """Whether a sink's target is a folder, not a topic or another system."""
    return ("/" in to or to.startswith(".")) and not is_target(to)


class FileSink:
    """One folder, fed by one stage."""

    def __init__(self, to: str, *, stage: str) -> None:
        url, _, query = to.partition("?")
        options = _options(to, query)
        self.format = _format(to, options.get("format", "parquet"))
        self.partition_by = column_names(options.get("partition_by", ""))
        self._stage = stage
        scheme, found, rest = url.partition("://")
        if found and scheme != "file":
            raise Unsupported(
                f"A file sink does not support {scheme}://.", advice="Use a folder, or the name of a topic."
            )
        self._folder = Path(rest if found else url)
        self._own = self._folder / _FOLDER
        self._ledger = self._own / "ledger.json"

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._folder.absolute()

    @property
    def last(self) -> Marker | None:
        """The marker of the batch that was added last."""
        try:
            return Marker.from_canonical(self._ledger.read_bytes())
        except FileNotFoundError:
            return None

    def begin(self, marker: Marker) -> Path | None:
        """The folder to write a batch to, to be made by the writer; None where the batch was added before."""
        if not is_new(self._stage, self.last, marker):
            return None
        (self._own / "staged").mkdir(parents=True, exist_ok=True)
        PROCESS.reach("files: begun")
        return self._own / "staged" / uuid.uuid4().hex

    def commit(self, marker: Marker, staged: Path) -> int:
        """Adds what was written there; returns how many files. None are added where somebody else has added the batch since."""
        PROCESS.reach("files: staged")
        with self._locked():
            if not is_new(self._stage, self.last, marker):
                shutil.rmtree(staged, ignore_errors=True)
                return 0
            files = sorted(file for file in staged.glob(self._inside("*")) if file.name[0] not in "_.")
            prefix = f"{marker.query[:8]}-{marker.epoch:08d}-"
            for left in self._folder.glob(self._inside(f"{prefix}*")):
                left.unlink()
            PROCESS.reach("files: moving")
            for number, file in enumerate(files):
                _sync(file)
                place = self._folder / file.parent.relative_to(staged)
                place.mkdir(parents=True, exist_ok=True)
                file.rename(place / f"{prefix}{number:04d}.{self.format}")
                PROCESS.reach("files: moved one")
            self._sync_folders({file.parent.relative_to(staged) for file in files})
            self._enter(marker)
            PROCESS.reach("files: entered")
            for attempt in (self._own / "staged").iterdir():
                shutil.rmtree(attempt, ignore_errors=True)
            PROCESS.reach("files: swept")
        return len(files)

    def _inside(self, name: str) -> str:
        """The pattern of files in the folders of all values."""
        return "/".join([*(f"{column}=*" for column in map(_literal, self.partition_by)), name])

    def _sync_folders(self, places: set[Path]) -> None:
        """Makes the names of files, and of folders that are new, outlast a power loss."""
        for place in {above for each in places for above in (each, *each.parents)} | {Path()}:
            _sync(self._folder / place)

    def _enter(self, marker: Marker) -> None:
        partial = self._own / "ledger.partial"
        partial.write_bytes(marker.canonical())
        _sync(partial)
        PROCESS.reach("files: ledger written")
        partial.rename(self._ledger)
        _sync(self._own)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the folder's lock. Whoever holds it needs moments; one that does not end was stopped, and is named."""
        with open(self._own / "lock", "a+") as lock:
            deadline = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        lock.seek(0)
                        raise TimedOut(
                            f"{lock.read() or 'Another process'} holds {lock.name} and makes no progress.",
                            advice="The sink added nothing. Resume that process, or end it.",
                        ) from None
                    time.sleep(_LOOK_S)
            lock.truncate(0)
            lock.write(f"Process {os.getpid()}")
            lock.flush()
            yield

    def accept_new_checkpoint(self) -> Marker | None:
        """Forgets the last marker, so that the next batch may have any; returns it."""
        if self.last is None:
            return None
        with self._locked():
            last = self.last
            self._ledger.unlink(missing_ok=True)
        return last


def _options(to: str, query: str) -> dict[str, str]:
    found = dict(parse_qsl(query, keep_blank_values=True))
    if query and (not found or not found.keys() <= {"format", "partition_by"}):
        raise InvalidInput(
            f"The sink {to!r} is not valid.",
            advice="After the folder, write ?format=parquet, json or csv, and partition_by=COLUMN,COLUMN.",
        )
    return found


def _format(to: str, given: str) -> FileFormat:
    for known in get_args(FileFormat):
        if given == known:
            return known
    raise InvalidInput(f"The sink {to!r} is not valid.", advice="Write ?format=parquet, json or csv.")


def _literal(name: str) -> str:
    """A column's name as Spark writes it in the name of a folder, with nothing in it that a pattern would understand."""
    return "".join(f"[{char}]" if char in "*?[" else f"%{ord(char):02X}" if char in _ESCAPED else char for char in name)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
