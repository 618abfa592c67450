"""A restart: a stage that lost its checkpoint starts a new one, at a place that the user chose.

The place is on disk before the checkpoint is removed. The removal is on disk before the last marker is forgotten. So after a kill or a
power loss on the way the user chooses again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headwater.app.outputs.sinks import ledger_of
from headwater.log.disk.atomic_file import read_file, replace_file
from headwater.log.disk.disk import Disk, RealDisk
from headwater.log.log import Log
from headwater.log.port.stage import check_query
from headwater.model.errors import InvalidApp, NotFound
from headwater.model.marker import Marker
from headwater.processing.graph.graph import StageNode
from headwater.sinks.files import FileSink
from headwater.sinks.sink import Sink, is_target

if TYPE_CHECKING:
    from headwater.processing.stages.analysis import StageAnalysis

Restart = Literal["marker", "earliest", "latest"]
"""Where a stage starts that lost its checkpoint: after its last batch, or at one end of its inputs."""


def checked_restarts(given: Mapping[str, str]) -> dict[str, Restart]:
    """The chosen places, checked; `InvalidApp`."""
    known: dict[str, Restart] = {"marker": "marker", "earliest": "earliest", "latest": "latest"}
    for name, start in given.items():
        if start not in known:
            raise InvalidApp(f"Stage {name!r} cannot start from {start!r}.", advice="Use marker, earliest or latest.")
    return {name: known[start] for name, start in given.items()}


def check_restart(stage: StageNode, analysed: StageAnalysis, restart: Restart) -> None:
    """Refuses a place that would give other results. The state of a query is lost with its checkpoint, so only a full replay is right."""
    if analysed.stateful and restart != "earliest":
        raise InvalidApp(
            f"{stage.place} keeps state ({', '.join(analysed.stateful)}), which was lost with its checkpoint.",
            advice=f"Start from its first events: --accept-new-checkpoint {stage.name}=earliest.",
        )
    if stage.capture is not None and restart == "latest":
        raise InvalidApp(
            f"{stage.place} would skip changes, and its target would hold parts of transactions.",
            advice=f"Continue where it was, or start from its first events: --accept-new-checkpoint {stage.name}=marker or =earliest.",
        )
    replaces = stage.kind == "view" or (stage.kind == "sink" and is_target(stage.to))
    if not analysed.stateful and restart == "earliest" and not replaces:
        raise InvalidApp(
            f"{stage.place} would write its earlier results a second time.",
            advice=f"Continue after its last batch: --accept-new-checkpoint {stage.name}=marker.",
        )


def check_checkpoint(log: Log, stage: StageNode, name: str, checkpoint: Path) -> None:
    """Refuses a checkpoint that does not belong to the last batch of a stage; `CheckpointConflict`.

    The check opens nothing: an application that was started by mistake, with another folder `state`, fences nothing of the one that runs.
    """
    from headwater.processing.checkpoint.marker import query_of
    from headwater.processing.sink.staging import can_stage

    query: str | None = None
    with suppress(NotFound):
        query = query_of(str(checkpoint))
    ledger = ledger_of(stage, name)
    if ledger is None:
        by_task = stage.kind != "view" and not can_stage(log)
        for each in (name, *(_tasks(log, name) if by_task else ())):
            check_query(each, log.store.stage_state(each).last, query)
        return
    try:
        check_query(name, ledger.last, query)
    finally:
        _close(ledger)


def begin_again(
    log: Log,
    stage: StageNode,
    name: str,
    restart: Restart,
    *,
    checkpoint: Path,
    starts: Path,
    disk: Disk | None = None,
) -> str:
    """Forgets the checkpoint and the last marker of a stage, and returns a note. The file `starts` records where it starts."""
    disk = disk or RealDisk()
    ledger = ledger_of(stage, name)
    try:
        last = log.stage(name).last if ledger is None else ledger.last
        tasks = _tasks(log, name)
        if restart == "marker" and last is None:
            raise _no_marker(stage, by_task=bool(tasks))
        chosen = json.dumps(_beginnings(log, stage, restart, last)).encode("utf-8")
        _make_folder(disk, starts.parent)
        replace_file(disk, str(starts), [chosen], point="restart:")
        _remove_checkpoint(disk, checkpoint)
        disk.reach("restart: checkpoint removed")
        if ledger is None:
            for each in (name, *tasks):
                log.stage(each).accept_new_checkpoint()
        else:
            ledger.accept_new_checkpoint()
    finally:
        if ledger is not None:
            _close(ledger)
    place = f"after its last batch ({last})" if restart == "marker" else f"at the {restart} events of its inputs"
    return f"{stage.place} starts with a new checkpoint {place}."


def beginnings(starts: Path, *, disk: Disk | None = None) -> dict[str, str]:
    """Where the inputs of a restarted stage start; empty for another stage."""
    try:
        found: dict[str, str] = json.loads(read_file(disk or RealDisk(), str(starts)))
    except FileNotFoundError:
        return {}
    return found


def _make_folder(disk: Disk, folder: Path) -> None:
    """A folder that is on disk with its name."""
    disk.make_folder(str(folder))
    for each in (folder, folder.parent):
        disk.sync_folder(str(each))


def _remove_checkpoint(disk: Disk, checkpoint: Path) -> None:
    """Also on disk: a power loss could restore the checkpoint, and the query would continue from it without its last marker."""
    disk.remove_folder(str(checkpoint))
    with suppress(FileNotFoundError):
        disk.sync_folder(str(checkpoint.parent))


def _beginnings(log: Log, stage: StageNode, restart: Restart, last: Marker | None) -> dict[str, str]:
    """Where each input begins. The ends of this moment are told as offsets: a first batch that is run again must not begin elsewhere."""
    from headwater.processing.checkpoint.offsets import places_of
    from headwater.processing.checkpoint.query_start import places_text

    begin = dict.fromkeys(stage.inputs, "earliest")
    done = places_of(last.ends) if restart == "marker" and last is not None else {}
    for topic in stage.inputs if restart != "earliest" else ():
        spans = log.offsets(topic)
        places = {number: span.stop for number, span in spans.items()}
        if restart == "marker":
            places = {number: done.get((topic, number), span.start) for number, span in spans.items()}
        begin[topic] = places_text(topic, places)
    return begin


def _tasks(log: Log, name: str) -> list[str]:
    """The stages of a stage's tasks: on Kafka each task has one of its own."""
    own = re.compile(rf"{re.escape(name)}\.\d+")
    return [each for each in log.stages() if own.fullmatch(each)]


def _close(ledger: FileSink | Sink) -> None:
    if not isinstance(ledger, FileSink):
        ledger.close()


def _no_marker(stage: StageNode, *, by_task: bool) -> InvalidApp:
    if by_task:
        return InvalidApp(
            f"{stage.place} writes to Kafka task by task. It is unknown which tasks of its last batch were written.",
            advice=f"Restore the checkpoint. To skip the events since then, use --accept-new-checkpoint {stage.name}=latest.",
        )
    return InvalidApp(
        f"{stage.place} has not written a batch yet, so it has no marker to continue from.",
        advice=f"Use --accept-new-checkpoint {stage.name}=earliest, or leave out the option.",
    )
