"""The marker of a micro-batch, from the files that Spark writes into a query's checkpoint before it runs the batch.

    metadata                {"id": "<the query's id>"}: made once, kept for as long as the checkpoint lives
    offsets/<batch id>      "v1", a line with the batch's settings, then one line for each source: where the batch ends in it
    commits/<batch id>      is there when the batch is done

All are private to Spark; this module is the only one that reads them here, and `test_spark_sink` pins what it finds. A batch
that is run again has the same file, so it has the same marker. Paths may be local or any URL that `pyarrow.fs` knows.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pyarrow.fs as pafs

from headwater.model.errors import InvalidInput, NotFound
from headwater.model.marker import Marker

_VERSIONS = ("v1", "v2")
_NO_OFFSET = "-"


def marker_of(checkpoint: str, batch_id: int) -> Marker:
    """What identifies a batch of the query with this checkpoint."""
    return Marker(query=query_of(checkpoint), epoch=batch_id, ends=ends_of(checkpoint, batch_id))


def query_of(checkpoint: str) -> str:
    """The id of the query that a checkpoint belongs to."""
    raw = _read(checkpoint, "metadata")
    try:
        return str(msgspec.json.decode(raw)["id"])
    except (msgspec.DecodeError, KeyError, TypeError):
        raise _not_understood(checkpoint, "metadata") from None


def ends_of(checkpoint: str, batch_id: int) -> list[Any]:
    """Where a batch ends in each of its query's sources, in the order of the sources."""
    name = f"offsets/{batch_id}"
    version, _, *ends = _read(checkpoint, name).decode("utf-8").split("\n")
    if version not in _VERSIONS:
        raise _not_understood(checkpoint, name)
    return [_value(end) for end in ends if end]


def planned(checkpoint: str) -> int | None:
    """The last batch that a query has begun; None where there is none."""
    return _newest(checkpoint, "offsets")


def committed(checkpoint: str) -> int | None:
    """The last batch that a query has done, all of it; None where there is none."""
    return _newest(checkpoint, "commits")


def planned_at_us(checkpoint: str, batch_id: int) -> int:
    """When a batch was noted as begun, by the clock of the files."""
    system, path = _place(checkpoint)
    return int((system.get_file_info(f"{path}/offsets/{batch_id}").mtime_ns or 0) // 1000)


def forget_plan(checkpoint: str, batch_id: int) -> None:
    """Lets the newest batch, of which nothing was written anywhere, be planned anew when its query is next started."""
    system, path = _place(checkpoint)
    for name in (f"{batch_id}", f".{batch_id}.crc"):
        with suppress(FileNotFoundError):
            system.delete_file(f"{path}/offsets/{name}")


def _newest(checkpoint: str, folder: str) -> int | None:
    system, path = _place(checkpoint)
    selector = pafs.FileSelector(f"{path}/{folder}", allow_not_found=True)
    return max(
        (int(file.base_name) for file in system.get_file_info(selector) if file.base_name.isdigit()), default=None
    )


def _value(end: str) -> Any:
    if end == _NO_OFFSET:
        return None
    try:
        return msgspec.json.decode(end)
    except msgspec.DecodeError:
        return end


def _read(checkpoint: str, name: str) -> bytes:
    try:
        system, path = _place(checkpoint)
        with system.open_input_stream(f"{path}/{name}") as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        raise NotFound(
            f"There is no {name} in the checkpoint {checkpoint}.",
            advice="It was deleted while the query ran, and nothing was written. Stop the query and restore the file.",
        ) from None


def _place(checkpoint: str) -> tuple[pafs.FileSystem, str]:
    if "://" in checkpoint or checkpoint.startswith("file:"):
        url = checkpoint if "://" in checkpoint else "file://" + checkpoint.removeprefix("file:")
        system, path = pafs.FileSystem.from_uri(url)
    else:
        system, path = pafs.LocalFileSystem(), checkpoint
    return system, path.rstrip("/")


def _not_understood(checkpoint: str, name: str) -> InvalidInput:
    return InvalidInput(
        f"{name} in the checkpoint {checkpoint} is not as Spark 4.3 writes it.",
        advice="Run the Spark version that Headwater is made for.",
    )
