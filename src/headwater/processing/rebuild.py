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
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from headwater.model.errors import HeadwaterError, InvalidApp
from headwater.processing.border import told
from headwater.processing.marker import committed, ends_of, query_of
from headwater.processing.offsets import Offsets
from headwater.processing.poison import Skips
from headwater.processing.runner import Plan, Runner, sentence
from headwater.processing.session import activate
from headwater.processing.state import layouts, write_whole
from headwater.processing.state_files import StateFolder

Rebuild = Literal["all", "kept"]
"""From which events a state is rebuilt: all of them, or those that retention has kept."""


def rebuild(runner: Runner, plan: Plan, how: Rebuild, *, folder: Path) -> str:
    """Rebuilds the state of a stage, before it is started; says what was done."""
    stage = plan.stage
    if not plan.analysed.operators:
        raise InvalidApp(
            f"{stage.place} has no operator of ours, so there is no state to be rebuilt.",
            advice="What Spark's own aggregates and joins remember is in the checkpoint: see --accept-new-checkpoint.",
        )
    last = committed(plan.checkpoint)
    if last is None:
        return f"{stage.place} has done no batch yet: there is nothing to be rebuilt."
    ends = [Offsets.from_json(end or {}) for end in ends_of(plan.checkpoint, last)]
    stop = {topic: next((end for end in ends if topic in end.topics), Offsets({}, {})) for topic in stage.inputs}
    if how == "all":
        _check_kept(runner, plan, stop)
    scratch = folder / "rebuild" / Path(plan.checkpoint).name
    shutil.rmtree(scratch, ignore_errors=True)
    events = sum(offset for end in stop.values() for offset in end.places.values())
    replay = msgspec.structs.replace(
        plan,
        checkpoint=str(scratch / "checkpoint"),
        operators=str(scratch / "operators"),
        stop={topic: json.dumps(end.to_json()) for topic, end in stop.items()},
    )
    _run(runner, replay, Skips(folder / "skipped" / f"{stage.name}.json"))
    _take_over(replay, plan, last)
    shutil.rmtree(scratch, ignore_errors=True)
    return f"{stage.place}: its state was rebuilt from {events:,} events, and goes on behind batch {last}."


def _check_kept(runner: Runner, plan: Plan, stop: Mapping[str, Offsets]) -> None:
    """What the query began with must still be there."""
    for topic, end in stop.items():
        given = plan.start.get(topic, "")
        began = Offsets.from_json(json.loads(given)).places if given.startswith("{") else {}
        for number, span in runner.log.offsets(topic).items():
            if (topic, number) in end.places and span.start > began.get((topic, number), 0):
                raise InvalidApp(
                    f"{plan.stage.place}: retention has removed events of {topic}[{number}] before offset {span.start:,}, "
                    "which its state was made of.",
                    advice="Where what is kept reaches back far enough (a window, a lateness), have it rebuilt from that: "
                    f"--rebuild-state {plan.stage.name}=kept. Otherwise put the state back.",
                )


def _run(runner: Runner, replay: Plan, skips: Skips) -> None:
    """Runs the stage to where it stops, and throws away what it gives."""
    activate(runner.spark)
    try:
        writer = runner.result(replay, skips).writeStream.format("noop").outputMode(replay.stage.mode)
        writer = writer.queryName(f"{replay.stage.name} (rebuilding)").option("checkpointLocation", replay.checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination()
    except Exception as error:
        ours = error if isinstance(error, HeadwaterError) else told(error)
        why = sentence(error, replay.stage) if ours is None else f"[{ours.code}] {ours}"
        raise InvalidApp(
            f"{replay.stage.place}: its state cannot be rebuilt: {why}", advice="Correct that, and try again."
        ) from error


def _take_over(replay: Plan, plan: Plan, epoch: int) -> None:
    """Writes what the replay remembers as the state of the query's last batch."""
    query, last = query_of(plan.checkpoint), committed(replay.checkpoint)
    uids = StateFolder(replay.operators).names()
    if last is None or not uids:
        raise InvalidApp(
            f"{plan.stage.place} has read no event up to batch {epoch}, so nothing can be rebuilt.",
            advice=f"Begin from its first events: --accept-new-checkpoint {plan.stage.name}=earliest.",
        )
    for uid in uids:
        for there in layouts(f"{replay.operators}/{uid}")[plan.state_partitions]:
            version = there.version(last)
            here = StateFolder(f"{plan.operators}/{uid}/{there.name}")
            write_whole(here, msgspec.structs.replace(version, query=query, epoch=epoch), [(there, version)])
