"""A folder of files as a sink, for whoever reads Parquet, JSON or CSV: each batch adds its files once.

    <folder>/<query>-<epoch>-<number>.parquet   the files of one batch; readers of the folder see these only
    <folder>/_headwater/ledger.json             the marker of the batch that was added last
    <folder>/_headwater/staged/                 what a batch is written to before it counts

A batch is written aside, its files are moved into the folder under names that it alone has, and then the ledger names its marker.
A crash in between leaves some of its files: the batch is run again, and replaces them by the same names before it is entered. So
after any crash the folder holds each batch once; while files are moved a reader may see a part of the newest one. The rules for
what may follow a marker are the log's own (`headwater.log.stage.is_new`).

Names that begin with "_" are left out by Spark, pyarrow and DuckDB when they read a folder.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal, get_args

from headwater.log.stage import is_new
from headwater.model.errors import InvalidInput, Unsupported
from headwater.model.marker import Marker

FileFormat = Literal["parquet", "json", "csv"]

_FOLDER = "_headwater"


def is_folder(to: str) -> bool:
    """Whether a sink's target is a folder, not a topic."""
    return "/" in to or to.startswith(".")


class FileSink:
    """One folder, fed by one stage."""

    def __init__(self, to: str, *, stage: str) -> None:
        url, _, query = to.partition("?")
        self.format = _format(to, query)
        self._stage = stage
        scheme, found, rest = url.partition("://")
        if found and scheme != "file":
            raise Unsupported(f"There is no sink for {scheme}:// yet.", advice="Use a folder, or a topic's name.")
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
        staged = self._own / "staged"
        shutil.rmtree(staged, ignore_errors=True)
        self._own.mkdir(parents=True, exist_ok=True)
        return staged

    def commit(self, marker: Marker, staged: Path) -> int:
        """Adds what was written there; returns how many files."""
        prefix = f"{marker.query[:8]}-{marker.epoch:08d}-"
        for left in self._folder.glob(f"{prefix}*"):
            left.unlink()
        files = sorted(file for file in staged.iterdir() if file.name[0] not in "_.")
        for number, file in enumerate(files):
            _sync(file)
            file.rename(self._folder / f"{prefix}{number:04d}.{self.format}")
        _sync(self._folder)
        partial = self._own / "ledger.partial"
        partial.write_bytes(marker.canonical())
        _sync(partial)
        partial.rename(self._ledger)
        _sync(self._own)
        shutil.rmtree(staged, ignore_errors=True)
        return len(files)

    def accept_new_checkpoint(self) -> Marker | None:
        """Forgets the last marker, so that the next batch may have any; returns it."""
        last = self.last
        self._ledger.unlink(missing_ok=True)
        return last


def _format(to: str, query: str) -> FileFormat:
    if not query:
        return "parquet"
    name, _, value = query.partition("=")
    for known in get_args(FileFormat):
        if name == "format" and value == known:
            return known
    raise InvalidInput(
        f"The sink {to!r} is not understood.", advice="Write ?format=parquet, json or csv behind the folder."
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
