"""The comparison of two sides: chunk by chunk by checksum, then the keys of chunks that differ, then the rows of keys that differ.

The target is looked at first. Where a sink feeds it, its ledger says how far it follows a topic; a source that is that topic is then
read up to exactly there, so the answer is exact while both go on (`exact`). Where there is no such position (a database as the
source, Redis as the target) keys that differ are read again, source and target, until they agree or have stayed the same on both sides for
`settle_s`: what is on its way is no difference, what stays is one.

At most `DIFFERENCES_MAX` differing keys are told; how many there are is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.json_types import row_texts
from headwater.model.errors import InvalidInput
from headwater.sinks.sink import Shape
from headwater.verify.digest import Digests, LocalDigests, Sums, canonical
from headwater.verify.log_sides import TopicSide
from headwater.verify.postgres_side import PostgresLook
from headwater.verify.side import Follows, Look, VerifySide, nullable
from headwater.verify.side_url import side_of

DIFFERENCES_MAX = 10_000
ROWS_AT_ONCE = 500_000
"""Of chunks that differ so many rows' digests are in memory at a time, of both sides together."""

SETTLE_S = 10.0
SETTLES_MAX = 6
"""After so many times `settle_s` keys that differ whenever they are looked at, each time otherwise, are told as they are."""

_LOOK_S = 0.25

Kind = Literal["missing", "extra", "different"]


class Difference(msgspec.Struct, frozen=True):
    """A key that is not the same on both sides; `columns` are those in which its rows differ."""

    kind: Kind
    key: Mapping[str, Any]
    columns: tuple[str, ...] = ()
    source: str | None = None
    target: str | None = None


class Repaired(msgspec.Struct, frozen=True):
    """What a repair did, and what a comparison found afterwards."""

    written: int
    removed: int
    refused: tuple[str, ...]
    after: VerifyReport


class VerifyReport(msgspec.Struct, frozen=True):
    """What a comparison found, and what was repaired of it."""

    source: str
    target: str
    rows: int
    chunks: int
    differing: int
    differences: tuple[Difference, ...]
    duplicates: int
    unreadable: tuple[str, ...]
    exact: bool
    behind: int | None
    stage: str | None
    repaired: Repaired | None = None

    @property
    def is_equal(self) -> bool:
        """Whether both sides hold the same; after a repair, whether they do now."""
        if self.repaired is not None:
            return self.repaired.after.is_equal
        return not self.differing and not self.duplicates and not self.unreadable


class Pair:
    """A source and a target in the same columns."""

    def __init__(self, source: VerifySide, target: VerifySide, shape: Shape, *, stage: str | None = None) -> None:
        self.source = source
        self.target = target
        self.shape = shape
        self.stage = stage
        source.take(shape)
        target.take(shape)

    @property
    def topic(self) -> str | None:
        """The topic that the source is."""
        return self.source.topic if isinstance(self.source, TopicSide) else None

    @contextmanager
    def looks(self) -> Iterator[tuple[Look, Look]]:
        """Both sides at one position, where there is one: the target first."""
        with ExitStack() as stack:
            there = stack.enter_context(self.target.look(topic=self.topic, stage=self.stage))
            at = None if there.follows is None or self.topic is None else there.follows.places
            here = stack.enter_context(self.source.look(at=at))
            yield here, there

    def is_final(self, here: Look, there: Look) -> bool:
        """Whether what differs now does so for good: both were read at one position, or nothing is on its way to the target."""
        follows = there.follows
        if self.topic is None or follows is None:
            return False
        if there.is_moment:
            return here.is_final
        with self.target.look(topic=self.topic, stage=self.stage) as again:
            return again.follows == follows and self.behind(follows) == 0

    def behind(self, follows: Follows | None) -> int | None:
        """How many events the target has not seen yet; None where nobody knows."""
        if follows is None or not isinstance(self.source, TopicSide):
            return None
        return self.source.behind(follows.places)

    def close(self) -> None:
        """Frees both."""
        self.source.close()
        self.target.close()


def open_pair(
    source: str,
    target: str,
    *,
    key: Sequence[str] = (),
    columns: Sequence[str] = (),
    stage: str | None = None,
) -> Pair:
    """Both sides of a comparison, in the columns that the log says, or the source, or the target."""
    here = side_of(source)
    try:
        there = side_of(target)
    except BaseException:
        here.close()
        raise
    try:
        return Pair(here, there, _shape(here, there, key, columns), stage=stage)
    except BaseException:
        here.close()
        there.close()
        raise


def compare(pair: Pair, *, settle_s: float = SETTLE_S) -> VerifyReport:
    """Compares both sides once, whole."""
    with pair.looks() as (here, there):
        found = _Found(pair, here, there)
        keys = found.keys
        told = _differences(pair.shape, keys, here, there)
        exact = pair.is_final(here, there)
        follows, unreadable = there.follows, tuple(sorted({*here.unreadable, *there.unreadable}))
    if keys.num_rows and not exact:
        keys, told, exact = _settled(pair, keys, told, settle_s)
    beyond = found.differing - found.keys.num_rows
    return VerifyReport(
        source=pair.source.url,
        target=pair.target.url,
        rows=found.rows,
        chunks=found.chunks,
        differing=len(told) + beyond,
        differences=tuple(told),
        duplicates=found.duplicates,
        unreadable=unreadable,
        exact=exact,
        behind=pair.behind(follows),
        stage=None if follows is None else follows.stage,
    )


class _Found:
    """The keys that differ between two looks, by checksums first."""

    def __init__(self, pair: Pair, here: Look, there: Look) -> None:
        ours, theirs = _digests(here, pair.shape), None
        try:
            theirs = _digests(there, pair.shape)
            sums, others = ours.sums(), theirs.sums()
            self.rows = sum(count for count, _, _ in sums.values())
            self.chunks = len({*sums, *others})
            self.differing = self.duplicates = 0
            keys: list[pa.Table] = []
            for chunks in _in_memory(sums, others):
                source, target = ours.of_chunks(chunks), theirs.of_chunks(chunks)
                self.duplicates += _twice(source) + _twice(target)
                differing = _differing(source, target).select(list(pair.shape.key))
                keys.append(differing.slice(0, max(0, DIFFERENCES_MAX - self.differing)))
                self.differing += differing.num_rows
        finally:
            ours.close()
            if theirs is not None:
                theirs.close()
        self.keys = pa.concat_tables(keys) if keys else _keys_of([], pair.shape)


def _in_memory(sums: Sums, others: Sums) -> Iterator[list[str]]:
    """The chunks that differ, as many at a time as have `ROWS_AT_ONCE` rows."""
    differ = sorted(chunk for chunk in {*sums, *others} if sums.get(chunk) != others.get(chunk))
    chunks: list[str] = []
    rows = 0
    for chunk in differ:
        count = sum(side[chunk][0] for side in (sums, others) if chunk in side)
        if chunks and rows + count > ROWS_AT_ONCE:
            yield chunks
            chunks, rows = [], 0
        chunks.append(chunk)
        rows += count
    if chunks:
        yield chunks


def _differing(source: pa.Table, target: pa.Table) -> pa.Table:
    """The digests of one side that the other has not, and those of keys that only the target has."""
    only = source.filter(pc.invert(pc.is_in(_pairs(source), value_set=_pairs(target))))
    extra = target.filter(pc.invert(pc.is_in(target.column("key"), value_set=source.column("key").combine_chunks())))
    return pa.concat_tables([only, extra])


def _digests(look: Look, shape: Shape) -> Digests:
    computed = look.digests() if isinstance(look, PostgresLook) else None
    return LocalDigests(look.chunks(), shape) if computed is None else computed


def _settled(
    pair: Pair, keys: pa.Table, told: list[Difference], settle_s: float
) -> tuple[pa.Table, list[Difference], bool]:
    """Looks at keys again until they agree, differ at one position, or have not changed on either side for a while."""
    since = began = time.monotonic()
    while keys.num_rows and time.monotonic() - began < SETTLES_MAX * settle_s:
        time.sleep(_LOOK_S)
        with pair.looks() as (here, there):
            now = _differences(pair.shape, keys, here, there)
            if pair.is_final(here, there):
                return keys, now, True
        if now != told:
            since, told = time.monotonic(), now
            keys = _keys_of(now, pair.shape)
        if time.monotonic() - since >= settle_s:
            break
    return keys, told, False


def _differences(shape: Shape, keys: pa.Table, here: Look, there: Look) -> list[Difference]:
    """What differs of some keys, column by column."""
    if not keys.num_rows:
        return []
    ours, theirs = here.rows(keys), there.rows(keys)
    columns = list(shape.schema.names)
    texts = [{name: canonical(rows, [name]).to_pylist() for name in columns} for rows in (ours, theirs)]
    places = [{key: at for at, key in enumerate(canonical(rows, shape.key).to_pylist())} for rows in (ours, theirs)]
    shown = [_shown(rows) for rows in (ours, theirs)]
    found = []
    for key, plain in zip(canonical(keys, shape.key).to_pylist(), keys.to_pylist(), strict=True):
        one, other = (place.get(key) for place in places)
        if one is not None and other is not None:
            differ = tuple(name for name in columns if texts[0][name][one] != texts[1][name][other])
            if differ:
                found.append(Difference("different", plain, differ, shown[0][one], shown[1][other]))
        elif one is not None:
            found.append(Difference("missing", plain, source=shown[0][one]))
        elif other is not None:
            found.append(Difference("extra", plain, target=shown[1][other]))
    return found


def _shown(rows: pa.Table) -> list[str]:
    return [text for batch in rows.combine_chunks().to_batches() for text in row_texts(batch).to_pylist()]


def _keys_of(differences: Sequence[Difference], shape: Shape) -> pa.Table:
    fields = [shape.schema.field(name) for name in shape.key]
    return pa.Table.from_pylist([dict(one.key) for one in differences], schema=nullable(pa.schema(fields)))


def _pairs(digests: pa.Table) -> pa.Array:
    joined = pc.binary_join_element_wise(digests.column("digest"), digests.column("key"), " ")
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def _twice(digests: pa.Table) -> int:
    return digests.num_rows - pc.count_distinct(digests.column("key")).as_py()


def _shape(here: VerifySide, there: VerifySide, key: Sequence[str], columns: Sequence[str]) -> Shape:
    sides = sorted((here, there), key=lambda side: not isinstance(side, TopicSide))
    shapes = [shape for shape in (side.shape() for side in sides) if shape is not None]
    if not shapes:
        raise InvalidInput(
            f"Neither {here.url} nor {there.url} has a schema.", advice="Compare with the topic, as LOG#TOPIC."
        )
    found, *others = shapes
    added = _added(sides[0], others)
    keys = [shape.key for shape in shapes if shape.key and not added & set(shape.key)]
    if not key and not keys:
        raise InvalidInput(f"The key of {found.name!r} is unknown.", advice="Pass the key columns with --key.")
    chosen = tuple(key) or keys[0]
    own = [name for name in found.schema.names if name not in added]
    names = list(dict.fromkeys([*chosen, *(columns or own)]))
    unknown = [name for name in names if name not in found.schema.names]
    if unknown:
        raise InvalidInput(
            f"{found.name!r} has no column {unknown[0]!r}.", advice=f"Its columns are: {', '.join(found.schema.names)}."
        )
    return Shape(found.name, pa.schema([found.schema.field(name) for name in names]), chosen)


def _added(side: VerifySide, others: Sequence[Shape]) -> set[str]:
    """The columns that a capture has added to what a database holds, where the other side is that, and not a copy of the topic."""
    if not isinstance(side, TopicSide):
        return set()
    return {name for name in side.added() if others and all(name not in other.schema.names for other in others)}
