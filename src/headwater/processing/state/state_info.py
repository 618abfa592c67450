"""The state of operators as people look at it: found in a folder, summed up, and some of its rows.

The folder may be that of an application, one of its checkpoints, the place that `state=` names, or the folder of one operator. Nothing
is changed, and nothing needs a Spark. What is wrong with a state is part of what is told of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pyarrow as pa

from headwater.model.errors import Damaged, HeadwaterError, NotFound
from headwater.model.url import bare, inside, without_password
from headwater.processing.state import sorted_runs
from headwater.processing.state.files import REBUILD, StateFolder, Version
from headwater.processing.state.state import held_runs, layouts

_ONLY = ("checkpoints", "operators")
_DEPTH_MAX = 4


class StateTableInfo(msgspec.Struct, frozen=True):
    """One table: what its rows mean, how many are kept (those among them that newer ones replace), and in how many runs."""

    kind: str
    rows: int
    runs: int


class StateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one operator in its newest version that all partitions have."""

    stage: str
    operator: str
    url: str
    partitions: int | None = None
    version: int | None = None
    watermark_us: int | None = None
    bytes: int = 0
    query: str | None = None
    fingerprint: str | None = None
    tables: dict[str, StateTableInfo] = {}
    trouble: str | None = None


def find_states(url: str) -> list[StateInfo]:
    """The state of every operator in a folder; `NotFound` where there is none."""
    found = [_describe(each) for each in _operators(inside(url), 0)]
    if not found:
        raise NotFound(
            f"No state of operators was found in {without_password(url)}.",
            advice="Name the application's script, its state folder (…/apps/NAME), a checkpoint, or what state= says; "
            "a stage without hw.dedupe, hw.sliding, hw.lookup or the like keeps none.",
        )
    return found


def rows_of(info: StateInfo, table: str) -> Iterator[pa.Table]:
    """The rows of a table, partition by partition, piece by piece."""
    for folder, version in _newest(info.url):
        yield from sorted_runs.merged(held_runs(folder, version, table), version.kinds[table], is_oldest=True)


def rows_kept(url: str) -> int:
    """How many rows the operators of a stage keep, counted in the newest files only: one that was replaced counts until it is merged."""
    return sum(
        run.rows
        for each in _operators(url, 0)
        for _, version in _newest(each)
        for held in version.tables.values()
        for run in held
    )


def _operators(url: str, depth: int) -> Iterator[str]:
    if layouts(url):
        yield url
        return
    names = StateFolder(url).names(folders_only=True)
    if depth < _DEPTH_MAX:
        for name in [name for name in _ONLY if name in names] or names:
            yield from _operators(inside(url, name), depth + 1)


def _describe(url: str) -> StateInfo:
    above, _, uid = bare(url).rpartition("/")
    stage = above.removesuffix("/operators").rpartition("/")[2]
    try:
        newest = _newest(url)
        size = sum(folder.size(epoch) for folder, version in newest for epoch in version.needs)
    except HeadwaterError as error:
        return StateInfo(stage=stage, operator=uid, url=url, trouble=error.what)
    first = newest[0][1]
    held = {name: [run for _, version in newest for run in version.tables.get(name, ())] for name in first.kinds}
    return StateInfo(
        stage=stage,
        operator=uid,
        url=url,
        partitions=first.partitions,
        version=first.epoch,
        watermark_us=min((each.watermark for _, each in newest if each.watermark is not None), default=None),
        bytes=size,
        query=first.query,
        fingerprint=first.fingerprint,
        tables={
            name: StateTableInfo(kind, sum(run.rows for run in held[name]), len(held[name]))
            for name, kind in first.kinds.items()
        },
    )


def _newest(url: str) -> list[tuple[StateFolder, Version]]:
    """The newest version that all partitions have, of the number of partitions that has it."""
    complete = []
    for layout, folders in layouts(url).items():
        if len(folders) == layout.partitions:
            common = set.intersection(*(set(folder.epochs()) for folder in folders))
            complete += [(max(common), folders)] if common else []
    if not complete:
        raise Damaged(
            f"No version of the state in {without_password(url)} is complete in all its partitions.", advice=REBUILD
        )
    epoch, folders = max(complete, key=lambda each: each[0])
    return [(folder, folder.version(epoch)) for folder in folders]
