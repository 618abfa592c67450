"""Rebuilding: the state of a stage's operators made anew from the log, for a query that has a checkpoint and lost its state.

The stage's function is run again over the events that its query has read, from the first one to where its checkpoint stands, as a
query of its own whose result is thrown away: nothing is written twice. What its operators remember then is what the lost state held,
because results do not depend on how batches were cut. It is written as the state of the last batch that the checkpoint has as done, and
the query goes on from there.

It happens in `<state folder>/rebuild/<stage>`, which is begun anew each time, and the state is taken over partition by partition, in files
that are there whole or not at all. Whoever is killed on the way leaves a state that is refused as before, to be rebuilt again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from headwater.log.disk.disk import RealDisk
from headwater.model.errors import HeadwaterError, InvalidApp
from headwater.model.url import inside
from headwater.processing.checkpoint.marker import committed, ends_of, query_of
from headwater.processing.checkpoint.offsets import VERSION, Offsets
from headwater.processing.checkpoint.query_start import beginning, places_text
from headwater.processing.spark.errors import our_error_in
from headwater.processing.spark.session import activate
from headwater.processing.stages.failure import sentence
from headwater.processing.stages.skips import Skips
from headwater.processing.stages.stage_plan import StagePlan
from headwater.processing.stages.supervisor import Supervisor
from headwater.processing.state.files import StateFolder
from headwater.processing.state.state import layouts, write_whole

Rebuild = Literal["all", "kept"]
"""From which events a state is rebuilt: all of them, or those that retention has kept."""


def rebuild(supervisor: Supervisor, plan: StagePlan, how: Rebuild, *, folder: Path) -> str:
    """Rebuilds the state of a stage, before it is started; says what was done."""
    stage = plan.stage
    if not plan.analysed.operators:
        raise InvalidApp(
            f"{stage.place} has no operator of Headwater, so it has no state that could be rebuilt.",
            advice="The state of Spark's own aggregates and joins is in the checkpoint: see --accept-new-checkpoint.",
        )
    last = committed(plan.checkpoint)
    if last is None:
        return f"{stage.place} has done no batch yet: there is nothing to be rebuilt."
    ends = [Offsets.from_json(end or {}) for end in ends_of(plan.checkpoint, last)]
    stop = {topic: next((end for end in ends if topic in end.topics), Offsets({}, {})) for topic in stage.inputs}
    start = _kept(supervisor, plan, stop, how)
    scratch = folder / "rebuild" / Path(plan.checkpoint).name
    RealDisk().remove_folder(str(scratch))
    events = sum(
        max(0, offset - start[topic].get(number, 0))
        for topic, end in stop.items()
        for (name, number), offset in end.places.items()
        if name == topic
    )
    replay = msgspec.structs.replace(
        plan,
        checkpoint=str(scratch / "checkpoint"),
        operators=str(scratch / "operators"),
        start={topic: places_text(topic, places) for topic, places in start.items()},
        stop={topic: json.dumps(end.to_json()) for topic, end in stop.items()},
        begun=plan.checkpoint,
    )
    _run(supervisor, replay, Skips(folder / "skipped" / f"{stage.name}.json"))
    _take_over(replay, plan, last)
    RealDisk().remove_folder(str(scratch))
    return f"{stage.place}: its state was rebuilt from {events:,} events, and goes on behind batch {last}."


def _kept(
    supervisor: Supervisor, plan: StagePlan, stop: Mapping[str, Offsets], how: Rebuild
) -> dict[str, dict[int, int]]:
    """For each partition of each input the first offset to read; for "all" what the query began with must still be there."""
    began = beginning(plan.checkpoint)
    start: dict[str, dict[int, int]] = {}
    for topic, end in stop.items():
        spans = supervisor.log.offsets(topic)
        for number, span in spans.items():
            if how == "all" and (topic, number) in end.places and span.start > began.get((topic, number), 0):
                raise InvalidApp(
                    f"{plan.stage.place}: retention has removed events of {topic}[{number}] before offset {span.start:,}, "
                    "from which its state was built.",
                    advice="If the events that are left reach back far enough (a window, a lateness), rebuild the state from them: "
                    f"--rebuild-state {plan.stage.name}=kept. Otherwise restore the state.",
                )
        start[topic] = {number: max(span.start, began.get((topic, number), 0)) for number, span in spans.items()}
    return start


def _run(supervisor: Supervisor, replay: StagePlan, skips: Skips) -> None:
    """Runs the stage to where it stops, and throws away what it gives."""
    activate(supervisor.spark)
    try:
        writer = supervisor.inputs.result(replay, skips).writeStream.format("noop").outputMode(replay.stage.mode)
        writer = writer.queryName(f"{replay.stage.name} (rebuilding)").option("checkpointLocation", replay.checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination()
    except Exception as error:
        ours = error if isinstance(error, HeadwaterError) else our_error_in(error)
        why = sentence(error, replay.stage) if ours is None else f"[{ours.code}] {ours}"
        raise InvalidApp(
            f"{replay.stage.place}: its state cannot be rebuilt: {why}", advice="Correct that, and try again."
        ) from error


def _take_over(replay: StagePlan, plan: StagePlan, epoch: int) -> None:
    """Writes what the replay remembers as the state of the query's last batch."""
    query, last = query_of(plan.checkpoint), committed(replay.checkpoint)
    uids = StateFolder(replay.operators).names()
    if last is None or not uids:
        raise InvalidApp(
            f"{plan.stage.place} has read no event up to batch {epoch}, so nothing can be rebuilt.",
            advice=f"Start from its first events: --accept-new-checkpoint {plan.stage.name}=earliest.",
        )
    for uid in uids:
        [(layout, folders)] = layouts(inside(replay.operators, uid)).items()
        topic = plan.analysed.fused[uid][0] if layout.by == "topic" else None
        for there in folders:
            version = there.version(_numbered(replay.checkpoint, last, topic))
            here = StateFolder(inside(plan.operators, uid, there.name))
            written = msgspec.structs.replace(version, query=query, epoch=_numbered(plan.checkpoint, epoch, topic))
            write_whole(here, written, [(there, version)])


def _numbered(checkpoint: str, batch: int, topic: str | None) -> int:
    """The version that a state has after a batch: the batch's number; that of an operator inside a source stands in its offsets."""
    if topic is None:
        return batch
    ends = [Offsets.from_json(end or {}) for end in ends_of(checkpoint, batch)]
    return next(int(end.more[VERSION]) for end in ends if topic in end.topics)
